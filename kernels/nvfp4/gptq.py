"""GPTQ: what rounding a weight does to the output is made up for by the weights that are not rounded yet.

(Frantar et al., 2022; ``feedback.py`` has the formula.) The Hessian is damped, and its blocks put in the order of what
is left of their energy once the later ones make up for them (``curvature.py``). Scales are chosen by what rounding the
whole block in sequence costs, several ways at once (``scale_paths.py``). At the end a search for better codes and some
passes of descent (``refine.py``) let the weights that were rounded first see what became of the others.
"""

from __future__ import annotations

import dataclasses
import weakref

import torch
from torch import Tensor

from fp8_compile.torch_internals.autograd import version

from . import e2m1
from .curvature import ORDERS, factored, filled
from .feedback import TO_ZERO, round_blocks
from .refine import refine
from .scale_paths import best_scales
from .weight import SCALE_DTYPE, blocks_of

# The widest matrix, how many paths it gets and how many steps of the search for codes. What they cost for each weight
# grows with the width, and what they gain shrinks: on 64 rows of 2048 columns with correlated inputs the error of 8
# paths was 0.99x and that of 16 paths with 500 steps 1.00x of that of 128 paths with 2000.
EFFORT = ((1536, 128, 2000), (4096, 8, 500))
LEAST_EFFORT = (4, 200)


@dataclasses.dataclass(frozen=True)
class Options:
    """``candidates``: E4M3 numbers below and above the scale that makes the block's largest weight 6; ``paths``: ways
    to choose scales that are followed at once, 1 is the fastest; ``passes`` of descent; ``steps`` of the search for
    codes, of each row, before the first pass and after each. None: by the width (``EFFORT``)."""

    damping: float = 0.01
    order: str = "pivot"
    candidates: tuple[int, int] = (2, 6)
    paths: int | None = None
    passes: int = 1
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"gptq: order={self.order!r} is unknown; expected one of: {', '.join(ORDERS)}")
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"gptq: damping expects a finite number above 0, got {self.damping!r}")
        if (self.paths is not None and self.paths < 1) or min(self.passes, self.steps or 0, *self.candidates) < 0:
            raise ValueError(
                "gptq: expected paths of 1 or more, passes and steps of 0 or more and candidates (below, above) of 0 "
                f"or more, got paths={self.paths!r}, passes={self.passes!r}, steps={self.steps!r}, "
                f"candidates={self.candidates!r}"
            )

    def effort(self, columns: int) -> tuple[int, int]:
        """Paths and steps for a matrix."""
        own = next(((paths, steps) for widest, paths, steps in EFFORT if columns <= widest), LEAST_EFFORT)
        return self.paths or own[0], own[1] if self.steps is None else self.steps


def quantize(
    w: Tensor,
    global_scale: Tensor,
    hessian: Tensor,
    block_size: int = 16,
    options: Options | None = None,
    progress: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of an [N, K] matrix; hessian: [K, K]."""
    options = options or Options()
    blocks = blocks_of(w, block_size)
    rows, count, size = blocks.shape
    order, curvature, factor = _prepared(hessian, blocks, options)
    block_order = order[::size] // size
    weights = (blocks.flatten(1) * (1.0 / global_scale))[:, order]
    kept_zero = ~blocks.any(2)[:, block_order]
    paths, steps = options.effort(len(factor))
    scales = best_scales(weights, kept_zero, factor, size, paths, options.candidates, progress)
    # From here on columns of weights are rows of memory.
    weights, scales = weights.t().contiguous(), scales.t().contiguous()
    kept_zero = kept_zero.t().contiguous()
    values = round_blocks(weights, torch.where(kept_zero, TO_ZERO, scales), factor)
    if options.passes:
        chosen = options.passes, steps, options.candidates
        values, scales = refine(weights, values, scales, kept_zero, curvature, *chosen)
    codes = torch.empty(rows, count * size, dtype=torch.uint8, device=w.device)
    codes[:, order] = e2m1.codes_of(values).t()
    block_scales = torch.empty(rows, count, dtype=SCALE_DTYPE, device=w.device)
    block_scales[:, block_order] = scales.t().to(SCALE_DTYPE)
    return e2m1.pack(codes), block_scales


def _prepared(hessian: Tensor, blocks: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """The order of columns, and in that order the damped Hessian and U. Layers that share their inputs share a Hessian,
    and come one after the other: what was found of the last one is kept as long as the Hessian is."""
    global _last
    key = version(hessian), blocks.shape[1:], options.damping, options.order
    if _last is not None and _last[0]() is hessian and _last[1] == key and not hessian.is_inference():
        return _last[2]
    _last = None
    found = factored(filled(hessian, blocks), blocks.shape[1], options.damping, options.order)
    _last = weakref.ref(hessian, _forget), key, found
    return found


def _forget(_: object) -> None:
    global _last
    _last = None


_last: tuple[weakref.ref[Tensor], tuple[object, ...], tuple[Tensor, Tensor, Tensor]] | None = None
