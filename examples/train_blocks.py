"""Train a byte language model in FP8 as large models are trained: block by block, as torchtitan does it.

    torchrun --nproc-per-node 2 examples/train_blocks.py --steps 20 --recompute selective

Every block recomputes its activations in backward (all of them, or those that are cheap), is compiled by itself and is
sharded by FSDP2, in this order. Blocks that look the same run one compiled code, each with scaling state of its own.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from tqdm import tqdm
from train_fsdp import start

import fp8_compile
from byte_lm import ByteLM, batches, stdlib_text

# Their results are kept; everything else is computed again.
EXPENSIVE = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}


def keep_what_is_expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


class Recomputed(nn.Module):
    """A block whose backward computes activations again instead of keeping them."""

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        super().__init__()
        self.block = block
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_what_is_expensive)
        self.options: dict[str, Any] = {"context_fn": contexts} if selective else {}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, **self.options)


def prepare(model: nn.Module, device: torch.device, recompute: str, backend: Any) -> None:
    """Recompute, compile and shard the blocks of a model, in place."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for number, block in enumerate(model.blocks):
        if recompute != "none":
            block = model.blocks[number] = Recomputed(block, selective=recompute == "selective")
        block.compile(backend=backend, fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 64 bytes on each rank")
    parser.add_argument("--recompute", choices=("none", "full", "selective"), default="selective")
    arguments = parser.parse_args()

    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    backend = fp8_compile.Backend()
    torch.manual_seed(0)  # every rank begins with the same weights and keeps its part of them
    model = ByteLM(arguments.layers, arguments.width, heads=4, context=64).to(device)
    prepare(model, device, arguments.recompute, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    fp8_compile.attach(model, optimizer)

    text, mean = stdlib_text(), torch.zeros(())
    for step in tqdm(range(arguments.steps), disable=rank > 0, unit="step"):
        generator = torch.Generator().manual_seed(step * ranks + rank)
        tokens, targets = next(batches(text, batch=arguments.batch, time=64, generator=generator))
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
    if rank == 0:
        print(f"{ranks} ranks, {arguments.steps} steps: loss {float(mean) / ranks:.4f} nats per byte")
        print(f"{arguments.layers} blocks, {len(backend.reports)} compiled graphs; {backend.reports[-1].summary()}")
        for number, block in enumerate(model.blocks):
            print(f"block {number}: {fp8_compile.scaling_state(block)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
