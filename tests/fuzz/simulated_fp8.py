"""FP8 by a report: a mode under which an eager model rounds the operands of the matmuls that a report calls rewritten.

    q(x) = fp8(x * F / m) * m / F       m: max |x| of the block, at least 1e-12; F: the largest value of the format

    tensorwise  a block is the whole operand
    rowwise     a row of the operand along the contraction
    blockwise   1 x 128 of inputs and gradients, 128 x 128 of weights
    delayed     the whole operand, with m * 2**margin: 2 in E4M3 and 6 in E5M2, none for weights, and the user's

The mode sees forward and backward as ATen operations. It follows what each storage is computed from, so what is a
weight, an input or a gradient is not taken from the report but compared with it. Sums are in FP64, and the rest of
the model is in its own dtype. Nothing here is shared with the engine.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_compile import Config, Report

aten = torch.ops.aten
PARAMETER, BUFFER, INPUT, GRADIENT = 1, 2, 4, 8
FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
    "e4m3fnuz": (torch.float8_e4m3fnuz, 240.0),
    "e5m2fnuz": (torch.float8_e5m2fnuz, 57344.0),
}
MARGINS = {"e4m3": 2, "e5m2": 6}
LEAST_AMAX = 1e-12
TILE = 128
ATTENTION = "_scaled_dot_product"
# Where (left, right, added) are among the arguments.
PRODUCTS = {
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    aten.baddbmm.default: (1, 2, 0),
}
OPS = ("mm", "bmm", "addmm", "baddbmm")
Key = tuple[bool, tuple[int | str, ...]]  # (in backward, shape): [B,] M, N, K


class Unaccounted(AssertionError):
    """The report and the products of the model contradict each other."""


@dataclasses.dataclass(frozen=True)
class Formats:
    """Of a config on a target: by name, for what flows forward and for gradients."""

    forward: str
    backward: str

    @classmethod
    def of(cls, config: Config) -> Formats:
        own = "fnuz" if str(config.target) == "hip:gfx942" else ""
        return cls(f"{config.forward_format}{own}", f"{config.backward_format}{own}")


class SimulatedFp8(TorchDispatchMode):
    """Replace products by a report; without one, only follow and count them.

    ``luck`` moves each scale by a random factor between 1/2 and 1, as ``StatelessFp8`` does, and for the same reason.
    """

    def __init__(
        self, config: Config, reports: Sequence[Report] | None, origins: Mapping[int, Iterable[Tensor]],
        luck: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.formats, self.luck = config, Formats.of(config), luck
        self.in_backward = False
        self.products = 0
        self.forgotten: list[str] = []  # eligible products that the report skips
        self._kept: list[Tensor] = []  # a storage that is freed would lend its address to another one
        self._origin: dict[int, int] = {}
        for origin, tensors in origins.items():
            for tensor in tensors:
                self.mark(tensor, origin)
        self._rows = None if reports is None else _by_shape(reports)

    def mark(self, tensor: Tensor, origin: int) -> None:
        self._kept.append(tensor)
        key = tensor.untyped_storage()._cdata
        self._origin[key] = self._origin.get(key, 0) | origin

    def origin(self, tensor: Tensor) -> int:
        return self._origin.get(tensor.untyped_storage()._cdata, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS and self._rows is not None:
            result = self._product(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if self._rows is not None and func.__name__.startswith(ATTENTION):
            self._attention(result[0])
        from_what = 0
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                from_what |= self.origin(leaf)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.mark(leaf, from_what)
        return result

    def _product(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        at_left, at_right, at_added = PRODUCTS[func]
        left, right = args[at_left], args[at_right]
        self.products += 1
        shape = (*left.shape[:-1], right.shape[-1], left.shape[-1])
        row = self._take(shape)
        if row is None:
            if not opened_by_inductor(shape) and 0 not in shape:  # what leads to nothing is not traced
                raise Unaccounted(f"{func} of {shape} has no row, {'backward' if self.in_backward else 'forward'}")
            return self._moved(func(*args, **kwargs))
        if not row.rewritten:
            if not row.reason:
                raise Unaccounted(f"skipped without a reason: {row}")
            self._check_skip(row, left, right, shape)
            return self._moved(func(*args, **kwargs))
        self._check_row(row, left, right)
        result = self._quantized(left, right, row.formats)
        if str(self.config.target) != "cpu" and self.config.recipe in ("rowwise", "blockwise"):
            result = result.bfloat16().double()  # all that a GPU's gemm of these recipes writes
        result = result * kwargs.get("alpha", 1)
        if at_added is not None and kwargs.get("beta", 1) != 0:
            result = result.to(left.dtype).double() + kwargs.get("beta", 1) * args[at_added].double()
        return result.to(left.dtype)

    def _take(self, shape: tuple[int, ...]) -> Any:
        """The row of a product, which torch may write in another way in a graph than in eager mode.

        In backward ``(b.T @ a.T).T`` stands for ``a @ b`` where strides say so, and those of a dimension of 0 or 1 are
        arbitrary. Of an input that is not contiguous there may be one product or a stack of them: as much work with
        another number of dimensions.
        """
        assert self._rows is not None
        if rows := self._rows[self.in_backward, shape]:
            return rows.popleft()
        *batch, m, n, k = shape
        if rows := self._rows[self.in_backward, (*batch, n, m, k)]:
            row = rows.popleft()
            return dataclasses.replace(row, formats=row.formats[::-1])
        if opened_by_inductor(shape):
            return None
        for (in_backward, other), rows in self._rows.items():
            if rows and in_backward == self.in_backward and len(other) == 7 - len(shape):
                if math.prod(other) == math.prod(shape) and rows[0].op in OPS:  # type: ignore[arg-type]
                    return rows.popleft()
        return None

    def _moved(self, result: Tensor) -> Tensor:
        """How a result falls in its own dtype is luck, too: it decides which units a ReLU switches off."""
        if self.luck is None:
            return result
        noise = torch.randn(result.shape, generator=self.luck, dtype=torch.float64)
        return (result.double() * (1 + noise * torch.finfo(result.dtype).eps / 2)).to(result.dtype)

    def _attention(self, result: Tensor) -> None:
        """A fused kernel has a row, with the shape of its first result."""
        rows = self._rows[self.in_backward, tuple(result.shape)]  # type: ignore[index]
        if not rows or rows[0].rewritten or not rows[0].op.startswith(ATTENTION):
            raise Unaccounted(f"attention of {tuple(result.shape)} has no row of its own: {rows}")
        rows.popleft()

    def _check_row(self, row: Any, left: Tensor, right: Tensor) -> None:
        """Formats and the name of the gemm follow from what the operands are computed from."""
        origins = [self.origin(side) for side in (left, right)]
        expected = tuple(self.formats.backward if one & GRADIENT else self.formats.forward for one in origins)
        if row.formats != expected:
            raise Unaccounted(f"{row.formats} instead of {expected}: {row}")
        weights = sum(is_weight(one) for one in origins)
        gemm = "output" if not self.in_backward else "grad_input" if weights else "grad_weight"
        if row.gemm != gemm or weights > 1:
            raise Unaccounted(f"{row.gemm} is {gemm}, of {weights} weights: {row}")

    def _check_skip(self, row: Any, left: Tensor, right: Tensor, shape: Sequence[int]) -> None:
        """A product with a weight may not be called one without; our CPU gemm takes all sizes."""
        origins = [self.origin(side) for side in (left, right)]
        flows = [bool(one & (INPUT | GRADIENT)) for one in origins]
        if sum(map(is_weight, origins)) != 1 or sum(flows) != 1 or 0 in shape:
            return
        sizes = list(shape[-3:])
        sizes.pop(1 if is_weight(origins[0]) else 0)  # the number of tokens
        small = min(sizes) < self.config.min_dim
        asked = row.reason.startswith(("excluded", "quantize_", "not in include"))
        asked |= self.in_backward and row.reason.startswith("makes a weight")  # the gradient of a low-rank product
        if not small and not asked and str(self.config.target) == "cpu":
            self.forgotten.append(str(row))

    def check_all_seen(self) -> None:
        left = [row for rows in (self._rows or {}).values() for row in rows]
        if left:
            raise Unaccounted(f"rows of products that the model does not have: {left}")

    def _quantized(self, left: Tensor, right: Tensor, formats: Sequence[str]) -> Tensor:
        """The product, FP64; of a stack, slice by slice."""
        if left.dim() == 3:
            return torch.stack([self._quantized(*pair, formats) for pair in zip(left, right)])
        q_left = self._rounded(left, formats[0], is_weight(self.origin(left)))
        q_right = self._rounded(right.t(), formats[1], is_weight(self.origin(right)))
        return q_left @ q_right.t()

    def _rounded(self, x: Tensor, format: str, weight: bool) -> Tensor:
        """x: [rows, contraction]."""
        recipe = self.config.recipe
        if recipe == "rowwise":
            return self._by_blocks(x, format, 1, x.shape[1])
        if recipe == "blockwise":
            return self._by_blocks(x, format, TILE if weight else 1, TILE)
        margin = 0
        if recipe == "delayed":
            margin = self.config.margin + (0 if weight else MARGINS[format[:4]])
        return self._one_block(x.double(), format, margin)

    def _by_blocks(self, x: Tensor, format: str, rows: int, columns: int) -> Tensor:
        """All blocks at once: the matrix is filled up with zeros, which change no maximum."""
        height, width = x.shape
        filled = torch.nn.functional.pad(x.double(), (0, -width % columns, 0, -height % rows))
        blocks = filled.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return self._one_block(blocks, format, 0, dims=(1, 3)).flatten(2, 3).flatten(0, 1)[:height, :width]

    def _one_block(self, x: Tensor, format: str, margin: int, dims: tuple[int, ...] | None = None) -> Tensor:
        dtype, largest = FORMATS[format]
        amax = x.abs().amax(dims, keepdim=True) if dims else x.abs().max()
        scale = largest / (amax.clamp_min(LEAST_AMAX) * 2.0**margin)
        if self.luck is not None:
            scale = scale * 2.0 ** -torch.rand(scale.shape, generator=self.luck, dtype=torch.float64)
        codes = (x * scale).clamp(-largest, largest).float().to(dtype)
        return codes.double() / scale


def is_weight(origin: int) -> bool:
    """Computed from parameters, perhaps with buffers, and from nothing that flows."""
    return bool(origin & PARAMETER) and not origin & (INPUT | GRADIENT)


def opened_by_inductor(shape: Sequence[int]) -> bool:
    """Products that Inductor's decompositions make into multiplications and sums before any pass sees them."""
    m, n, k = shape[-3:]
    return k == 1 or m == n == 1 or (m == 1 and k <= 16 and n <= 16)


def _by_shape(reports: Sequence[Report]) -> dict[Key, collections.deque[Any]]:
    """Forward rows in the order of the graphs; backward ones from the last graph to the first."""
    rows: dict[Key, collections.deque[Any]] = collections.defaultdict(collections.deque)
    for in_backward, ordered in ((False, reports), (True, reports[::-1])):
        for report in ordered:
            for row in report.rows:
                if (row.gemm != "output") == in_backward:
                    rows[in_backward, tuple(row.shape)].append(row)
    return rows
