"""Kernels and bytes of a training step as Inductor writes it for an absent GPU: FP8 against bf16 and torchao.

    python benchmarks/gpu_code.py [--cc 90|100|120] [--blocks swiglu ...] [--recipes delayed ...] [--json]
                                  [--peers tensorwise mxfp8 ...] [--without RelayoutBytes ...]

Counted in the generated code: Triton kernels, gemms, and the bytes that everything but the gemms reads and writes.
The milliseconds are a model, not a measurement: a kernel takes the longer of its bytes at the memory's full speed and
its FLOPs at the peak for dense operands, and 3 us more. No kernel reaches either, so only ratios between rows say
something. Attention is computed in bf16 everywhere.

``--without`` leaves passes out, by the names of their classes: a pass whose absence changes nothing has been overtaken
by Inductor, and can go.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch
import torchao_peers
from absent_gpu import AbsentGpu, absent_gpu
from count_launches import Step
from saved_bytes import GELU, TOKENS, WIDTH, SwiGLU
from torch import nn

from fp8_compile.config import RECIPES
from fp8_compile.passes import pipeline  # noqa: F401  knows every pass
from fp8_compile.passes.graph_pass import GraphPass, PassReport
from fp8_compile.target import Target

LAUNCH_SECONDS = 3e-6  # between the end of a kernel and the full speed of the next
HEADS, SEQUENCES = 16, 2
PEERS = ("tensorwise", "rowwise", "mxfp8")  # recipes of torchao; the last for sm_100


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU by its data sheet: bytes and dense FLOPs a second."""

    name: str
    target: str
    bandwidth: float
    fp8: float
    bf16: float


MACHINES = (
    Machine("H100", "cuda:90", 3.35e12, 1979e12, 989e12),  # SXM, HBM3
    Machine("B200", "cuda:100", 8e12, 4500e12, 2250e12),
)


class Attention(nn.Module):
    """RMSNorm, causal attention, residual; with fewer ``kv_heads`` than HEADS, grouped queries."""

    def __init__(self, kv_heads: int = HEADS, fused: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.size = nn.RMSNorm(WIDTH), WIDTH // HEADS
        self.widths = [WIDTH, kv_heads * self.size, kv_heads * self.size]
        widths = [sum(self.widths)] if fused else self.widths
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, width, bias=bias) for width in widths)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        parts = [linear(y) for linear in self.qkv]
        q, k, v = (self.heads(part) for part in (parts[0].split(self.widths, -1) if len(parts) == 1 else parts))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))

    def heads(self, part: torch.Tensor) -> torch.Tensor:
        """[batch, HEADS, time, size]: heads of a group share a key and a value."""
        batch, time, width = part.shape
        heads = part.view(batch, time, width // self.size, 1, self.size).permute(0, 2, 3, 1, 4)
        repeats = HEADS * self.size // width
        return heads.expand(-1, -1, repeats, -1, -1).reshape(batch, HEADS, time, self.size)


class Experts(nn.Module):
    """RMSNorm, SwiGLU experts on tokens that are sorted by expert, residual."""

    def __init__(self, experts: int = 8, width: int = WIDTH // 2, hidden: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        grouped = functools.partial(nn.functional.grouped_mm, offs=offsets)
        gate, up = grouped(self.norm(x), self.up.transpose(1, 2)).chunk(2, -1)
        return x + grouped(nn.functional.silu(gate) * up, self.down.transpose(1, 2))


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "swiglu": (SwiGLU, (TOKENS, WIDTH)),
    "attention": (Attention, (SEQUENCES, TOKENS // SEQUENCES, WIDTH)),
    "gelu": (GELU, (TOKENS, WIDTH)),
    "fused-qkv": (functools.partial(Attention, fused=True), (SEQUENCES, TOKENS // SEQUENCES, WIDTH)),
    "biased": (functools.partial(Attention, fused=True, bias=True), (SEQUENCES, TOKENS // SEQUENCES, WIDTH)),  # GPT-2's
    "gqa": (functools.partial(Attention, kv_heads=4), (SEQUENCES, TOKENS // SEQUENCES, WIDTH)),
    "experts": (Experts, (4 * TOKENS, WIDTH // 2)),
}


def lower(gpu: AbsentGpu, block: str, **arguments: Any) -> Step:
    """The training step of a block in bf16."""
    make, shape = BLOCKS[block]

    def inputs() -> tuple[torch.Tensor, ...]:
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        return (x, torch.empty(8, dtype=torch.int32)) if block == "experts" else (x,)

    return gpu.training_step(lambda: make().bfloat16(), inputs, **arguments)


def variants(capability: int, recipes: list[str], peers: Sequence[str] = PEERS[:2]) -> dict[str, dict[str, Any]]:
    """Name -> arguments of ``lower``; the first is what the others are compared with."""
    target = Target.parse(f"cuda:{capability}")
    by_name = {name: torchao_peers.float8(name) for name in peers if name != "mxfp8"}
    if "mxfp8" in peers and capability == 100:
        by_name["mxfp8"] = torchao_peers.mxfp8
    found: dict[str, dict[str, Any]] = {f"torchao {name}": {"convert": convert} for name, convert in by_name.items()}
    found["inductor bf16"] = {}
    for recipe in recipes:
        if recipe in target.recipes:
            found[f"fp8 {recipe}"] = {"backend": "fp8", "options": {"recipe": recipe, "target": str(target)}}
    return found


@contextlib.contextmanager
def without(names: list[str]) -> Iterator[None]:
    """Inside, the passes of these names do nothing."""
    passes = {found.__name__: found for found in GraphPass.__subclasses__()}
    if unknown := sorted(set(names) - set(passes)):
        raise ValueError(f"unknown passes {', '.join(unknown)}; there are {', '.join(sorted(passes))}")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(passes[name], "run", lambda self, graph: PassReport(0, "left out")))
        yield


def estimated_seconds(step: Step, machine: Machine) -> float:
    """A model, not a measurement: the sum over all launches of max(FLOPs / peak, bytes / bandwidth) + 3 us."""
    return sum(
        max(launch.flops / (machine.fp8 if launch.fp8 else machine.bf16), launch.bytes / machine.bandwidth)
        + LAUNCH_SECONDS
        for launch in step.launches
    )


def estimates(step: Step, recipe: str | None) -> dict[str, float | None]:
    """Milliseconds by machine; None where the machine's gemms can't do the recipe."""
    able = [machine.name for machine in MACHINES if recipe is None or recipe in Target.parse(machine.target).recipes]
    milliseconds = {machine.name: round(1e3 * estimated_seconds(step, machine), 3) for machine in MACHINES}
    return {name: value if name in able else None for name, value in milliseconds.items()}


def rows(
    capability: int, blocks: list[str], recipes: list[str], peers: Sequence[str] = PEERS[:2]
) -> Iterator[dict[str, Any]]:
    """The table, a row a block and variant, each as soon as it is there."""
    arguments = variants(capability, recipes, peers)
    with absent_gpu(capability) as gpu:
        for block in blocks:
            base, mxfp8 = None, None
            for name, how in arguments.items():
                step = lower(gpu, block, **how)
                base = base or step
                mxfp8 = step if name == "torchao mxfp8" else mxfp8
                of_mxfp8 = step.bytes_outside_gemms / mxfp8.bytes_outside_gemms if mxfp8 else None
                yield {
                    "block": block,
                    "variant": name,
                    "kernels": step.triton_kernels,
                    "gemms": step.gemms,
                    "other": step.others,
                    "mb_outside_gemms": round(step.bytes_outside_gemms / 1e6, 1),
                    "ratio": round(step.bytes_outside_gemms / base.bytes_outside_gemms, 3),
                    "ratio_to_mxfp8": None if of_mxfp8 is None else round(of_mxfp8, 3),
                    "estimated_ms": estimates(step, how.get("options", {}).get("recipe")),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cc", type=int, choices=(90, 100, 120), default=90, help="compute capability")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="recipes of torchao")
    parser.add_argument("--without", nargs="+", default=[], metavar="PASS", help="leave these passes out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()

    with without(arguments.without):
        show(arguments)


def show(arguments: argparse.Namespace) -> None:
    """Print the table."""
    table = rows(arguments.cc, arguments.blocks, arguments.recipes, arguments.peers)
    if arguments.json:
        print(json.dumps(list(table), indent=2))
        return
    print(f"training step of one block, {TOKENS} tokens, d={WIDTH}, bf16, as generated for sm_{arguments.cc}")
    print("ratio: bytes outside gemms to the first row's and torchao mxfp8's; ms: a model, not a measurement (--help)")
    machines = "".join(f"{'~' + machine.name + ' ms':>10}" for machine in MACHINES)
    print(f"{'block':11}{'variant':20}{'kernels':>8}{'gemms':>7}{'other':>7}{'MB':>9}{'ratio':>7}{'mxfp8':>7}{machines}")
    for row in table:
        counts = "{block:11}{variant:20}{kernels:8}{gemms:7}{other:7}{mb_outside_gemms:9.1f}{ratio:7.2f}".format(**row)
        counts += "      -" if row["ratio_to_mxfp8"] is None else f"{row['ratio_to_mxfp8']:7.2f}"
        values = ("-" if value is None else f"{value:.3f}" for value in row["estimated_ms"].values())
        print(counts + "".join(f"{value:>10}" for value in values), flush=True)


if __name__ == "__main__":
    main()
