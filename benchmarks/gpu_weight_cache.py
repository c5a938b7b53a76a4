"""What a training step moves outside its gemms on an absent GPU when weights come from the FP8 cache.

    python benchmarks/gpu_weight_cache.py [--cc 90|100|120] [--blocks swiglu attention ...]

bf16        Inductor, the peer
delayed     weights quantized in every forward
cached      read from the cache, as in every micro-batch but the first after an optimizer step

The first micro-batch has the refresh in addition, one launch: each weight is read once and written in both layouts, or
in one where the GPU reads any. Each of the others has a launch that checks a sample of every weight, 1 KB at most.
Counted in the generated code, as in ``gpu_code.py``.
"""

from __future__ import annotations

import argparse
from typing import Any, Iterator

import torch
from absent_gpu import absent_gpu
from gpu_code import BLOCKS, lower
from torch import nn

from fp8_compile.scaling.model_state import request
from fp8_compile.target import Target


def with_cache(model: nn.Module) -> nn.Module:
    """A ``convert``: the model has a cache before it is compiled."""
    request(model).cached = True
    return model


def variants(capability: int) -> dict[str, dict[str, Any]]:
    fp8: dict[str, Any] = {"backend": "fp8", "options": {"target": f"cuda:{capability}"}}
    return {
        "bf16": {},
        "delayed": fp8,
        "cached": {**fp8, "convert": with_cache},
    }


def refresh_megabytes(block: str, capability: int = 90) -> float:
    """bf16 read, FP8 written once or twice."""
    moved = 2 + (1 if Target.parse(f"cuda:{capability}").reads_any_layout else 2)
    with torch.device("meta"):
        model = BLOCKS[block][0]()
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return sum(weight.numel() for weight in weights) * moved / 1e6


def rows(capability: int, blocks: list[str]) -> Iterator[tuple[str, str, int, int, float, float]]:
    with absent_gpu(capability) as gpu:
        for block in blocks:
            for name, how in variants(capability).items():
                step = lower(gpu, block, **how)
                refresh = refresh_megabytes(block, capability) if "convert" in how else 0.0
                yield block, name, step.triton_kernels, step.gemms, step.bytes_outside_gemms / 1e6, refresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cc", type=int, choices=(90, 100, 120), default=90, help="compute capability")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=["swiglu", "attention"])
    arguments = parser.parse_args()
    print(f"{'block':11}{'variant':11}{'kernels':>8}{'gemms':>7}{'MB outside':>12}{'MB refresh a step':>19}")
    for block, name, kernels, gemms, megabytes, refresh in rows(arguments.cc, arguments.blocks):
        print(f"{block:11}{name:11}{kernels:8}{gemms:7}{megabytes:12.1f}{refresh:19.1f}", flush=True)


if __name__ == "__main__":
    main()
