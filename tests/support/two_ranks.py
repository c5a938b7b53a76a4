"""Two processes on gloo over the loopback: each runs the scenarios below and writes down what it saw.

    results = run_two_ranks(folder)      scenario -> [what rank 0 saw, what rank 1 saw]

What Inductor makes of a graph does not depend on who else trains: of DDP, which splits graphs, they are compiled by it,
and the others are interpreted.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile.scaling.distributed_checkpoint import load_scaling_state
from fp8_compile.torch_internals.modules import local_part, whole_of

WIDTH, HIDDEN, ROWS = 32, 64, 32
SECONDS = 300


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(compiled: Any, optimizer: Any, steps: range, part: slice = slice(None)) -> list[float]:
    losses = []
    for step in steps:
        loss = compiled(batch(step)[part]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def copies(state: fp8_compile.ScalingState) -> dict[str, tuple[int, ...]]:
    """Slot -> shape of the FP8 copy."""
    return {str(slot): tuple(entry.codes.shape) for slot, entry in state.weights.entries.items()}


# ---- scenarios ------------------------------------------------------------------------------------------------------


def ddp(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Half of the rows on each rank; Dynamo splits the graph at DDP's buckets. After two steps the first weights come
    back, so that one more step is one that a single process can do."""
    model = Blocks()
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    backend = fp8_compile.Backend()
    compiled = torch.compile(DistributedDataParallel(model, bucket_cap_mb=0.02), backend=backend)
    optimizer = make_optimizer(model)
    fp8_compile.attach(compiled, optimizer)
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    train(compiled, optimizer, range(2), half)
    state = fp8_compile.scaling_state(model)
    before = state.state_dict()
    model.load_state_dict(Blocks().state_dict())
    state.weights.stepped(model.parameters())  # as if by the optimizer: replaced weights would get their own scales
    losses = train(compiled, optimizer, range(2, 3), half)
    skipped = [row for report in backend.reports for row in report.skipped]
    found = {"losses": losses, "before": before, "after": state.state_dict(), "graphs": len(backend.reports)}
    return {**found, "skipped": len(skipped), "copies": copies(state), "refreshes": state.weights.refreshes}


def fsdp(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; and the two more again from the checkpoint, in a model of other weights."""

    def build(seed: int) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = Blocks(seed)
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        compiled, optimizer = torch.compile(model, backend=UncompiledBackend()), make_optimizer(model)
        fp8_compile.attach(compiled, optimizer)
        return model, compiled, optimizer

    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    model, compiled, optimizer = build(0)
    train(compiled, optimizer, range(2), half)
    states = get_state_dict(model, optimizer)
    scaling = fp8_compile.scaling_state(model).state_dict()
    dcp.save({"model": states[0], "optimizer": states[1], "scaling": scaling}, checkpoint_id=folder / "checkpoint")
    went_on = train(compiled, optimizer, range(2, 4), half)

    other, compiled, optimizer_of_other = build(1)
    states = get_state_dict(other, optimizer_of_other)
    loaded = {"model": states[0], "optimizer": states[1]}
    dcp.load(loaded, checkpoint_id=folder / "checkpoint")
    set_state_dict(other, optimizer_of_other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    load_scaling_state(other, folder / "checkpoint")
    resumed = train(compiled, optimizer_of_other, range(2, 4), half)

    def parts(model: nn.Module) -> list[torch.Tensor]:
        return [parameter.to_local().detach() for parameter in model.parameters()]

    return {
        "losses": [went_on, resumed],
        "parameters": [parts(model), parts(other)],
        "states": [fp8_compile.scaling_state(one).state_dict() for one in (model, other)],
        "saved": scaling,
        "copies": [copies(fp8_compile.scaling_state(one)) for one in (model, other)],
    }


def tensor_parallel(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Each rank has half of every weight."""
    model, mesh = Blocks(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled, optimizer = torch.compile(model, backend=UncompiledBackend()), make_optimizer(model)
    fp8_compile.attach(compiled, optimizer)
    losses = train(compiled, optimizer, range(3))
    state = fp8_compile.scaling_state(model)
    return {"losses": losses, "last": state.state_dict(), "copies": copies(state), "refreshes": state.weights.refreshes}


def without_gradients(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """The second rank has nothing to do in the first step, and an overflow in the second. Then a model whose options
    ask for loss scaling, which a rank that has not compiled it can't know."""

    def build(**settings: Any) -> tuple[Any, torch.optim.Optimizer, fp8_compile.Training]:
        model = Blocks()
        config = fp8_compile.Config(recipe="tensorwise", loss_scale=settings.get("option"))
        compiled, optimizer = torch.compile(model, backend=UncompiledBackend(config)), make_optimizer(model)
        return compiled, optimizer, fp8_compile.attach(compiled, optimizer, loss_scale=settings.get("attached"))

    compiled, optimizer, training = build(attached="dynamic")
    seen = []
    for step in range(3):
        if (rank, step) != (1, 0):
            overflow = float("inf") if (rank, step) == (1, 1) else 1.0
            (compiled(batch(step)).square().mean() * overflow).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([training.loss_scale, float(training.skipped_steps)])

    compiled, optimizer, training = build(option="dynamic")
    told = ""
    if rank == 0:
        compiled(batch(0)).square().mean().backward()
    try:
        optimizer.step()
    except ValueError as error:
        told = str(error)
    return {"seen": seen, "told": told}


def by_block(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """As torchtitan trains: each block recomputes activations, is compiled by itself and sharded; once for each way to
    recompute."""
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
    from train_blocks import prepare

    found: dict[str, Any] = {"losses": [], "graphs": [], "states": []}
    for recompute in ("none", "full", "selective"):
        model, backend = Blocks(), UncompiledBackend()
        prepare(model, torch.device("cpu"), recompute, backend)
        optimizer = make_optimizer(model)
        fp8_compile.attach(model, optimizer)
        half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        found["losses"].append(train(model, optimizer, range(3), half))
        found["graphs"].append([len(report.rewritten) for report in backend.reports])
        states = [fp8_compile.scaling_state(block).state_dict() for block in model.blocks]
        found["states"].append([{key.removeprefix("block."): row for key, row in one.items()} for one in states])
    return found


def packed_base(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Adapters over a packed base whose codes are sharded: uncompiled, then compiled, each beside one process with the
    whole batch; and the last steps again from a checkpoint, in a model of other weights."""

    def build(seed: int, shard: bool, compile: bool) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = Blocks(seed)
        fp8_compile.pack(model, method="rtn", progress=False)
        if shard:
            fp8_compile.shardable(model)
        torch.manual_seed(seed)
        lora = get_peft_model(model, LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))
        if shard:
            mesh = init_device_mesh("cpu", (2,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(lora, mesh=mesh)
        backend = UncompiledBackend(fp8_compile.Config(exclude=("*lora_*",)))
        run = torch.compile(lora, backend=backend) if compile else lora
        return lora, run, make_optimizer(lora)

    def gradients(model: nn.Module, run: Any, part: slice) -> dict[str, torch.Tensor]:
        run(batch(9)[part]).square().mean().backward()
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        return {name: whole_of(one).clone() for name, one in found.items()}

    half, whole = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2), slice(None)
    found: dict[str, Any] = {"losses": [], "alone": [], "gradients": [], "gradients_alone": []}
    for compile in (False, True):
        torch._dynamo.reset()
        model, run, optimizer = build(0, True, compile)
        found["gradients"].append(gradients(model, run, half))
        found["losses"].append(train(run, optimizer, range(2), half))
        modules = [one for one in model.modules() if isinstance(one, fp8_compile.PackedLinear)]
        held = [one for module in modules for one in module._parameters.values() if one is not None]
        codes = [one for one in held if one.dtype == torch.uint8]
        found["bytes"] = [sum(local_part(one).nbytes for one in codes), sum(one.nbytes for one in codes)]
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder / f"packed-{compile}")
        found["losses"].append(train(run, optimizer, range(2, 4), half))

        other, run, optimizer = build(1, True, compile)
        states = get_state_dict(other, optimizer)
        loaded = {"model": states[0], "optimizer": states[1]}
        dcp.load(loaded, checkpoint_id=folder / f"packed-{compile}")
        set_state_dict(other, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        found["losses"].append(train(run, optimizer, range(2, 4), half))

        model, run, optimizer = build(0, False, compile)
        found["gradients_alone"].append(gradients(model, run, whole))
        found["alone"].append(train(run, optimizer, range(4), whole))
    return found


def switched(rank: int, folder: pathlib.Path) -> dict[str, Any]:
    """Forward gemms go to high precision in mid-run and come back, under DDP, whose buckets split the graph, and under
    FSDP2."""
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        torch._dynamo.reset()
        model, backend = Blocks(), UncompiledBackend()
        wrapped: nn.Module = model
        if kind == "ddp":
            dist._DEFAULT_FIRST_BUCKET_BYTES = 1
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
        else:
            for part in (*model.blocks, model):
                fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        compiled = torch.compile(wrapped, backend=backend)
        found[kind] = train_and_switch(model, compiled, half)
        found[kind]["rows"] = [
            sum(row.gemm == "output" and "set_precision" in row.reason for row in report.skipped)
            for report in backend.reports
        ]
    return found


def train_and_switch(model: nn.Module, compiled: Any, part: slice = slice(None)) -> dict[str, Any]:
    """Two steps, two with forward gemms in high precision, and two as before: losses, the scaling state after each
    pair, and parameters."""
    optimizer, losses, states = make_optimizer(model), [], []
    fp8_compile.attach(compiled, optimizer)
    for start, output in ((0, None), (2, "high"), (4, None)):
        fp8_compile.set_precision(compiled, output=output)
        losses += train(compiled, optimizer, range(start, start + 2), part)
        states.append(fp8_compile.scaling_state(model).state_dict())
    parameters = [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()]
    return {"losses": losses, "states": states, "parameters": parameters}


SCENARIOS = {
    "ddp": ddp, "fsdp": fsdp, "tensor_parallel": tensor_parallel, "without_gradients": without_gradients,
    "by_block": by_block, "packed_base": packed_base, "switched": switched,
}  # fmt: skip


# ---- launching ------------------------------------------------------------------------------------------------------


def run_two_ranks(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Run them unless the folder has their results."""
    files = {name: [folder / f"{name}-{rank}.pt" for rank in range(2)] for name in SCENARIOS}
    if not all(file.exists() for some in files.values() for file in some):
        _run(folder)
    return {name: [torch.load(file, weights_only=True) for file in some] for name, some in files.items()}


def _run(folder: pathlib.Path) -> None:
    settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


def main(rank: int, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, scenario in SCENARIOS.items():
        torch._dynamo.reset()
        torch.save(scenario(rank, folder), folder / f"{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
