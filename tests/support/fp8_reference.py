"""FP8 written a second time: NumPy, FP64, tables, and no code of ``kernels/``. Tests measure the package against it.

A format is the table of its 256 values, decoded from the bits by the definition; rounding is a search in that table;
blocks are visited one by one; products are FP64. Slow, obvious, and wrong in other ways than the code under test.

The house rule for a tolerance: twice the error that this reference makes against FP64 (``Noise.check``), in FP8
where FP8 is measured, in FP32 where a gemm's sum is measured. No number in a test is tuned by hand.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, Mapping

import numpy as np
import torch
from torch import nn

WHOLE = -1
Block = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Fp8:
    """One sign bit, ``exponent_bits``, ``mantissa_bits``; ``special`` says which codes are not finite numbers."""

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: str  # "ieee": top exponent is Inf/NaN; "fn": all ones is NaN; "fnuz": the code of -0 is NaN

    @functools.cached_property
    def values(self) -> np.ndarray:
        """What each of the 256 codes stands for, FP64."""
        return np.array([self._decode(code) for code in range(256)])

    @functools.cached_property
    def magnitudes(self) -> np.ndarray:
        """The finite values from 0 upwards; a magnitude's index is its code."""
        positive = self.values[:128]
        finite = positive[np.isfinite(positive)]
        assert np.all(np.diff(finite) > 0)
        return finite

    @property
    def max(self) -> float:
        return float(self.magnitudes[-1])

    def _decode(self, code: int) -> float:
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> self.mantissa_bits
        mantissa = code & (2**self.mantissa_bits - 1)
        fraction = mantissa / 2**self.mantissa_bits
        if self.special == "ieee" and exponent == 2**self.exponent_bits - 1:
            return sign * np.inf if mantissa == 0 else np.nan
        if self.special == "fn" and code & 0x7F == 0x7F:
            return np.nan
        if self.special == "fnuz" and code == 0x80:
            return np.nan
        if exponent == 0:
            return sign * fraction * 2.0 ** (1 - self.bias)
        return sign * (1 + fraction) * 2.0 ** (exponent - self.bias)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Codes of the nearest values, ties to the even code, saturating. NaN is 0x7F, or 0x80 in fnuz."""
        x = np.asarray(x, np.float64)
        magnitude = np.abs(x)
        above = np.clip(np.searchsorted(self.magnitudes, magnitude), 1, len(self.magnitudes) - 1)
        to_lower = magnitude - self.magnitudes[above - 1]
        to_upper = self.magnitudes[above] - magnitude
        take_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (above % 2 == 0))
        code = np.where(take_upper, above, above - 1)
        keeps_sign = np.signbit(x) & ~((self.special == "fnuz") & (code == 0))  # fnuz has no -0
        nan = 0x80 if self.special == "fnuz" else 0x7F
        return np.where(np.isnan(x), nan, code | np.where(keeps_sign, 0x80, 0)).astype(np.uint8)

    def round(self, x: np.ndarray) -> np.ndarray:
        return self.values[self.encode(x)]


E4M3 = Fp8("e4m3", torch.float8_e4m3fn, 4, 3, 7, "fn")
E5M2 = Fp8("e5m2", torch.float8_e5m2, 5, 2, 15, "ieee")
E4M3_FNUZ = Fp8("e4m3fnuz", torch.float8_e4m3fnuz, 4, 3, 8, "fnuz")
E5M2_FNUZ = Fp8("e5m2fnuz", torch.float8_e5m2fnuz, 5, 2, 16, "fnuz")
FORMATS = (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix in FP8: codes, their values in FP64, and the FP32 scale of each block and of each element."""

    codes: np.ndarray
    values: np.ndarray
    dequant_scale: np.ndarray
    scale_of_element: np.ndarray

    @property
    def dequantized(self) -> np.ndarray:
        return self.values * self.scale_of_element.astype(np.float64)


def quantize(x: np.ndarray | torch.Tensor, format: Fp8, block: Block) -> Quantized:
    """Block by block. The scales are FP32 in this order, so that they can be compared bit by bit:

    ``quant_scale = fl(fl(1 / amax) * F)``, ``dequant_scale = fl(1 / quant_scale)``, ``q = round(fl(x * quant_scale))``.
    """
    x = to_numpy(x, np.float32)
    rows, cols = x.shape
    block_rows, block_cols = (size if b == WHOLE else b for b, size in zip(block, x.shape))
    row_starts, col_starts = range(0, rows, block_rows), range(0, cols, block_cols)
    quant_scale, scale_of_element = np.zeros(x.shape, np.float32), np.zeros(x.shape, np.float32)
    dequant_scale = np.zeros((len(row_starts), len(col_starts)), np.float32)
    one, largest, floor = np.float32(1), np.float32(format.max), np.float32(1e-12)
    with np.errstate(all="ignore"):
        for i, top in enumerate(row_starts):
            for j, left in enumerate(col_starts):
                here = (slice(top, top + block_rows), slice(left, left + block_cols))
                amax = np.maximum(np.max(np.abs(x[here])), floor)  # NaN if there is one
                quant_scale[here] = scale = (one / amax) * largest
                dequant_scale[i, j] = scale_of_element[here] = one / scale if np.isfinite(amax) else np.nan
        codes = format.encode(np.clip(x * quant_scale, -largest, largest))
    return Quantized(codes, format.values[codes], dequant_scale, scale_of_element)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Blocks as a gemm sees its operands: (rows, contraction)."""

    input: Block
    weight: Block
    grad_output: Block
    forward: Fp8 = E4M3
    backward: Fp8 = E4M3


_TENSOR, _ROW = (WHOLE, WHOLE), (1, WHOLE)
RECIPES = {
    "tensorwise": Recipe(_TENSOR, _TENSOR, _TENSOR, backward=E5M2),
    "rowwise": Recipe(_ROW, _ROW, _ROW),
    "blockwise": Recipe((1, 128), (128, 128), (1, 128)),
}


def recipe(name: str, *, fnuz: bool = False) -> Recipe:
    """The recipe of that name; ``fnuz``: in the formats of an MI300."""
    one = RECIPES[name]
    swap = {E4M3: E4M3_FNUZ, E5M2: E5M2_FNUZ}
    return dataclasses.replace(one, forward=swap[one.forward], backward=swap[one.backward]) if fnuz else one


def gemm(a: Quantized, b: Quantized, *, sum_in: type = np.float64) -> np.ndarray:
    """``a [M, K] @ b [N, K].T`` of the dequantized values.

    In FP64; or with ``sum_in=np.float32`` as an FP32 unit would do it, one product after the other: the error of that
    order is on the large side of what blocked sums make. The operands are dequantized before the sum, as tiles need it
    and as BLAS does with a factor of its own.
    """
    if sum_in is np.float64:
        return a.dequantized @ b.dequantized.T
    left, right = (side.values.astype(np.float32) * side.scale_of_element for side in (a, b))
    total = np.zeros((left.shape[0], right.shape[0]), np.float32)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, :, k]
    return total


def worst_fp32_error(a: Quantized, b: Quantized) -> np.ndarray:
    """What no order of an FP32 sum can exceed, element by element: ``n * 2**-24 * |a| @ |b|.T`` for n roundings on the
    way of a product (K sums, its own, two scales, a bias). For small shapes, where a reference's error may be zero by
    luck and twice it says nothing."""
    roundings = a.values.shape[1] + 4
    return roundings * 2.0**-24 * (np.abs(a.dequantized) @ np.abs(b.dequantized).T) * 1.001


@dataclasses.dataclass(frozen=True)
class LinearLayer:
    """The three gemms of ``y = x @ w.T`` under a recipe. x: [M, K], w: [N, K], dy: [M, N]."""

    recipe: Recipe
    sum_in: type = np.float64
    written_in: torch.dtype | None = None  # the one dtype that the gemm can write, if the target has only one

    def output(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        one = self.recipe
        return self._gemm(quantize(x, one.forward, one.input), quantize(w, one.forward, one.weight))

    def grad_input(self, dy: np.ndarray, w: np.ndarray) -> np.ndarray:
        one = self.recipe
        return self._gemm(quantize(dy, one.backward, one.grad_output), quantize(w.T, one.forward, one.weight))

    def grad_weight(self, dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        one = self.recipe
        return self._gemm(quantize(dy.T, one.backward, one.grad_output), quantize(x.T, one.forward, one.input))

    def _gemm(self, a: Quantized, b: Quantized) -> np.ndarray:
        result = gemm(a, b, sum_in=self.sum_in)
        return result if self.written_in is None else to_numpy(torch.from_numpy(result).to(self.written_in))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, layer: LinearLayer) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.layer = layer
        y = layer.output(_matrix(x), to_numpy(w, np.float32))
        return torch.from_numpy(y).to(x.dtype).reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        grad_input = ctx.layer.grad_input(_matrix(dy), to_numpy(w, np.float32))
        grad_weight = ctx.layer.grad_weight(_matrix(dy), _matrix(x))
        return (
            torch.from_numpy(grad_input).to(x.dtype).reshape(x.shape),
            torch.from_numpy(grad_weight).to(w.dtype),
            None,
        )


def reference_model(model: nn.Module, layer: LinearLayer) -> nn.Module:
    """A copy of the model, in its own dtype, whose ``nn.Linear`` are those of this file."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            module.forward = functools.partial(_forward, module, layer)  # type: ignore[method-assign]
    return twin


def _forward(module: nn.Linear, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    y = _Linear.apply(x, module.weight, layer)
    return y if module.bias is None else y + module.bias


def results(model: Any, x: torch.Tensor, grad_output: torch.Tensor) -> dict[str, np.ndarray]:
    """The output and every gradient of ``model(x)``, FP64; ``model`` may be compiled."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.backward(grad_output)
    found = {"output": y, "grad_input": x.grad}
    for name, parameter in model.named_parameters():
        found[f"grad of {name.removeprefix('_orig_mod.')}"] = parameter.grad
    return {name: to_numpy(tensor) for name, tensor in found.items()}


def exact_results(model: nn.Module, x: torch.Tensor, grad_output: torch.Tensor) -> dict[str, np.ndarray]:
    """The same in FP64 throughout."""
    return results(copy.deepcopy(model).double(), x.double(), grad_output.double())


class Noise:
    """How far low-precision results are from the exact ones, tensor by tensor, in the Frobenius norm."""

    def __init__(self, found: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> None:
        assert found.keys() == exact.keys(), f"{sorted(found)} is not {sorted(exact)}"
        self.error = {name: float(np.linalg.norm(found[name] - exact[name])) for name in exact}
        self.signal = {name: float(np.linalg.norm(exact[name])) for name in exact}

    def check(self, reference: Noise) -> None:
        """The house rule: nowhere more than twice the error of the reference."""
        over = [
            f"{name}: error {error:.3g} is {error / max(reference.error[name], 1e-300):.2f}x the reference's"
            for name, error in self.error.items()
            if not error <= 2 * reference.error[name]
        ]
        assert not over, "; ".join(over)

    def snr_db(self) -> dict[str, float]:
        return {name: 20 * float(np.log10(self.signal[name] / max(self.error[name], 1e-300))) for name in self.error}


def to_numpy(tensor: np.ndarray | torch.Tensor, dtype: type = np.float64) -> np.ndarray:
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().double().numpy()  # NumPy has no bf16
    return np.asarray(tensor).astype(dtype)


def codes_of(q: torch.Tensor) -> np.ndarray:
    """The bytes of an FP8 tensor."""
    return q.contiguous().view(torch.uint8).numpy()


def _matrix(x: torch.Tensor) -> np.ndarray:
    return to_numpy(x.reshape(-1, x.shape[-1]), np.float32)
