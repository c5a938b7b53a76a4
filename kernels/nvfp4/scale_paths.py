"""Block scales for GPTQ by a search over several ways at once.

    cost of a way = sum of e_j**2 of all weights rounded so far, under the scales that it chose

Every row keeps the ``paths`` cheapest ways to have rounded its blocks so far. For the next block each of them tries
``candidates`` scales, its 16 weights rounded one after the other, errors fed forward; of all that come out the cheapest
stay. The best scale for one block leaves errors to others that may be dearer there: at the end the row takes the way
that is cheapest over all blocks. One path is the greedy choice, block by block.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from tqdm import tqdm

from fp8_compile.kernels.cpu import nvfp4_search

from .feedback import TO_ZERO, Rounding
from .scale_search import FIRST, LAST
from .weight import SCALE_DTYPE, SMALLEST_SCALE, block_scale_of, chunks

JOINED = 4  # blocks between updates of all later columns
WIDTH = 1 << 16  # ways to round a block that are computed at once
ROWS = 256  # that the C++ search takes between two looks at the progress bar
REMEMBERED = 512  # weights to come that are kept for each of them: 128 MB in all


def best_scales(
    weights: Tensor,
    kept_zero: Tensor,
    factor: Tensor,
    size: int,
    paths: int,
    candidates: tuple[int, int],
    progress: bool = False,
) -> Tensor:
    """weights: FP32 [N, K] in units of the global scale, columns in the order of rounding; kept_zero: bool [N, K/B],
    blocks that stay zeros; factor: U, [K, K] -> FP32 [N, K/B], numbers of E4M3."""
    kernels = nvfp4_search.search_library() if weights.device.type == "cpu" else None
    rows, columns = weights.shape
    search = reference if kernels is None else functools.partial(nvfp4_search.scale_paths, kernels)
    found = weights.new_empty(rows, columns // size)
    width = paths * max(sum(candidates) + 1, columns // REMEMBERED) if kernels is None else WIDTH // ROWS
    for part in tqdm(chunks(rows, width, WIDTH), desc="gptq", disable=not progress, leave=False):
        found[part] = search(weights[part], kept_zero[part], factor, size, paths, candidates)
    return found


def reference(
    weights: Tensor, kept_zero: Tensor, factor: Tensor, size: int, paths: int, candidates: tuple[int, int]
) -> Tensor:
    """In PyTorch, all rows in step: what ``kernels/cpu/nvfp4_paths.cpp`` does row by row."""
    rows, columns = weights.shape
    count = columns // size
    rest = weights.unsqueeze(0)  # [paths, N, columns to come]
    cost = weights.new_zeros(1, rows)
    history: list[tuple[Tensor, Tensor]] = []  # by block: scales of the paths, and from which path each came
    for first in range(0, count, JOINED):
        blocks = range(first, min(first + JOINED, count))
        begin, end = first * size, blocks.stop * size
        here = rest[:, :, : end - begin].permute(2, 0, 1).contiguous()  # [joined columns, paths, N]
        errors = torch.empty(0, *cost.shape, device=weights.device)
        origin = torch.arange(len(cost), device=weights.device)[:, None].expand(-1, rows)
        for block in blocks:
            at, done = slice(block * size, (block + 1) * size), block * size - begin
            now = _chosen(here[done : done + size], origin)
            if done:
                now = now - (factor[begin : at.start, at].t() @ errors.flatten(1)).view(now.shape)
            cost, scales, came_from, added = _step(now, cost, factor[at, at], kept_zero[:, block], paths, candidates)
            history.append((scales, came_from))
            errors = torch.cat([_chosen(errors, came_from), added])
            origin = origin.gather(0, came_from)
        if end < columns:
            later = rest[:, :, end - begin :].flatten(0, 1)
            later = later.index_select(0, (origin * rows + torch.arange(rows, device=weights.device)).flatten())
            later.addmm_(errors.flatten(1).t(), factor[begin:end, end:], alpha=-1.0)
            rest = later.view(len(cost), rows, -1)
    way, found = cost.argmin(0, keepdim=True), []
    for scales, came_from in reversed(history):
        found.append(scales.gather(0, way))
        way = came_from.gather(0, way)
    return torch.cat(found[::-1]).t()


def _step(
    weights: Tensor, cost: Tensor, within: Tensor, kept_zero: Tensor, paths: int, candidates: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One block. weights: [B, P, N], cost: [P, N] -> the cheapest P': cost, scales, origins [P', N], e [B, P', N]."""
    size, before, rows = weights.shape
    scales, again = _candidates(weights.flatten(1), candidates)  # [C, P * N]
    choices = len(scales) * before
    zero, rounding = kept_zero.repeat(before), Rounding(within)
    taken = torch.where(zero, TO_ZERO, scales)
    missed = rounding.misses((weights.flatten(1).unsqueeze(1) * taken.reciprocal()).flatten(1))
    total = rounding.cost(missed, taken.flatten()).view(scales.shape).add_(cost.flatten())
    # Twice the same would leave less room for others: all scales of a block that stays zeros too.
    again[: candidates[0]] |= zero
    again[candidates[0] + 1 :] |= zero
    total.masked_fill_(again, torch.inf)
    if paths == 1:
        cost, index = total.view(choices, rows).min(0, keepdim=True)
    else:
        cost, index = total.view(choices, rows).t().topk(min(paths, choices), 1, largest=False)
        cost, index = cost.t().contiguous(), index.t().contiguous()
    chosen, taken = (one.view(choices, rows).gather(0, index) for one in (scales, taken))
    missed = _chosen(missed.view(size, choices, rows), index)
    return cost, chosen, index % before, rounding.errors(missed.flatten(1), taken.flatten()).view(missed.shape)


def _candidates(weights: Tensor, candidates: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """weights: [B, n] -> FP32 scales [C, n], and which of them are there already, at either end of E4M3."""
    largest = block_scale_of(weights.abs().amax(0), weights.new_ones(()), SMALLEST_SCALE)
    offsets = torch.arange(-candidates[0], candidates[1] + 1, device=weights.device)
    wanted = largest.view(torch.uint8).to(torch.int32) + offsets[:, None]
    byte = wanted.clamp(FIRST, LAST)
    return byte.to(torch.uint8).view(SCALE_DTYPE).to(torch.float32), wanted != byte


def _chosen(x: Tensor, index: Tensor) -> Tensor:
    """x: [..., P, N], index: [P', N] -> [..., P', N]."""
    return x.gather(-2, index.expand(*x.shape[:-2], *index.shape))
