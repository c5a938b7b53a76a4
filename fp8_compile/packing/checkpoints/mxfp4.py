"""Experts in MXFP4, as gpt-oss is published, become NVFP4: the same codes, and as a rule the same values.

    stack_blocks uint8 [E, N, K/32, 16]    two E2M1 codes per byte, even k in the low nibble
    stack_scales uint8 [E, N, K/32]        w = code * 2 ** (scale - 127), one scale per 32 weights

A scale of NVFP4, e4m3 * global, can be any of 18 neighbouring powers of two. So a matrix is exact where the scales of
its blocks span no more than that; blocks below it are rounded to the smallest scale, at most 2 ** -17 of the largest.
"""

from __future__ import annotations

import logging
from typing import Mapping

import torch
from torch import Tensor

from fp8_compile.kernels.nvfp4 import e2m1
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.packing.packed_experts import NVFP4Stack, PackedStack

from .stored_names import StoredNames

log = logging.getLogger("fp8_compile")
PARTS = ("blocks", "scales")
BLOCK, LOW, HIGH = 32, -9, 8  # weights per scale; the exponents of powers of two that E4M3 has


def read_mxfp4(
    names: StoredNames, tensors: Mapping[str, Tensor], device: torch.device | None
) -> dict[str, PackedStack]:
    """The stacks of a model that a checkpoint holds in MXFP4."""
    found: dict[str, PackedStack] = {}
    for stack, module in names.stacks.items():
        stored = [f"{stack}_{part}" for part in PARTS]
        if not any(name in tensors for name in stored):
            continue
        before = names.parameter(stack)
        experts, *sizes = before.shape
        transposed = module.is_transposed and not isinstance(before, PackedStack)
        n, k = reversed(sizes) if transposed else sizes
        if k % BLOCK:
            raise ValueError(f"{stack}: MXFP4 has blocks of {BLOCK} along K, and the model's K is {k}")
        for name, shape in zip(stored, ((experts, n, k // BLOCK, 16), (experts, n, k // BLOCK))):
            got = tensors.get(name)
            if got is None or got.dtype != torch.uint8 or tuple(got.shape) != shape:
                had = "nothing" if got is None else f"{got.dtype} {tuple(got.shape)}"
                raise ValueError(f"{name}: expected uint8 {shape} of the model's experts in MXFP4, got {had}")
        blocks, scales = (tensors[name] for name in stored)
        if bool((scales == 255).any()):
            raise ValueError(f"{stored[1]}: it has scales that are NaN; copy the checkpoint again")
        matrices = [as_nvfp4(*parts, f"{stack}[{expert}]") for expert, parts in enumerate(zip(blocks, scales))]
        place = device or next(iter([*module.parameters(), *module.buffers()])).device
        found[stack] = NVFP4Stack.of(matrices, before.dtype, bool(module.is_transposed)).to(place)
    return found


def as_nvfp4(blocks: Tensor, scales: Tensor, name: str) -> NVFP4Weight:
    """One matrix: blocks uint8 [N, K/32, 16], scales uint8 [N, K/32]."""
    rows = blocks.shape[0]
    exponents = scales.to(torch.int32) - 127
    used = (blocks & 0x77).ne(0).any(-1)  # a code of zero may have a sign
    largest = int(exponents[used].max()) if bool(used.any()) else 0
    smallest = max(largest - HIGH, -126) + LOW  # of the powers of two that the scales can be
    below = (exponents < smallest) & used
    codes = blocks
    if bool(below.any()):
        log.info("%s: %d of %d blocks rounded to a larger scale", name, int(below.sum()), below.numel())
        values = e2m1.values_of_packed(blocks[below]) * torch.exp2((exponents[below] - smallest).float())[:, None]
        codes = blocks.clone()
        codes[below] = e2m1.pack(e2m1.codes_of(values))
    powers = (exponents.clamp(min=smallest) - smallest + LOW).clamp(max=HIGH)
    block_scales = torch.exp2(powers.to(torch.float32)).to(torch.float8_e4m3fn).view(torch.uint8)
    return NVFP4Weight(
        codes.reshape(rows, -1).contiguous(),
        block_scales.repeat_interleave(2, 1).view(torch.float8_e4m3fn),
        torch.tensor(2.0 ** (smallest - LOW)),
        2 * codes[0].numel(),
    )
