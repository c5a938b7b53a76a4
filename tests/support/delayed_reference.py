"""Delayed scaling written a second time: NumPy, a slot at a time, lists instead of rings, and no code of ``kernels/``.

A :class:`Slot` follows one tensor through the passes; a :class:`Layer` has three of them and does the three gemms of
``y = x @ w.T`` in FP64 with operands rounded by the tables of ``fp8_reference``. Scales are FP32, in this order:

    m = max(window), or the newest, or the 99th percentile            window: the last L amaxes that entered
    quant_scale = fl(fl(1 / fl(m * 2**margin)) * F)                   both steps capped at the largest FP32
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from fp8_reference import E4M3, E5M2, Fp8, Quantized, gemm, to_numpy, worst_fp32_error

f32 = np.float32
LARGEST = f32(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a scale follows from the amaxes: the options of the recipe, by their names in the config."""

    amax_algorithm: str = "max"
    margin: int = 0
    amax_history_len: int = 16
    scale_update_interval: int = 1

    def __str__(self) -> str:
        return f"{self.amax_algorithm}-{self.margin}-{self.amax_history_len}-{self.scale_update_interval}"

    def summary(self, window: list[np.float32]) -> np.float32:
        if self.amax_algorithm == "max":
            return max(window)
        if self.amax_algorithm == "most_recent":
            return window[-1]
        falling = sorted(window, reverse=True)
        position = f32(0.01) * f32(len(window) - 1)  # from the largest: 99 of 100 lie below
        whole = int(position)
        high, low = falling[whole], falling[min(whole + 1, len(window) - 1)]
        return high - (high - low) * (position - f32(whole))

    def scale(self, m: np.float32, format: Fp8) -> np.float32:
        with np.errstate(over="ignore", divide="ignore"):
            reach = min(m * f32(2.0**self.margin), LARGEST)
            return min((f32(1) / reach) * f32(format.max), LARGEST)


class Slot:
    """One tensor from pass to pass. ``see`` quantizes it with what is known, and records it."""

    def __init__(self, rule: Rule, format: Fp8) -> None:
        self.rule, self.format = rule, format
        self.entered: list[np.float32] = []
        self.passes, self.quant_scale = 0, f32(0)

    def see(self, x: np.ndarray | torch.Tensor) -> Quantized:
        x = to_numpy(x, np.float32)
        amax = np.max(np.abs(x))  # NaN if there is one
        quantized = self._quantize(x, self._scale_for(amax))
        self._record(amax)
        return quantized

    def _scale_for(self, amax: np.float32) -> np.float32:
        """The known scale; without one, that of the tensor itself."""
        if self.quant_scale > 0:
            return self.quant_scale
        return self.rule.scale(amax, self.format) if 0 < amax < np.inf else f32(1)

    def _record(self, amax: np.float32) -> None:
        self.passes += 1
        if np.isfinite(amax):
            self.entered.append(amax)
        window = self.entered[-self.rule.amax_history_len :]
        due = self.passes % self.rule.scale_update_interval == 0 or self.quant_scale == 0
        if window and due and (m := self.rule.summary(window)) > 0:
            self.quant_scale = self.rule.scale(m, self.format)

    def _quantize(self, x: np.ndarray, scale: np.float32) -> Quantized:
        largest = f32(self.format.max)
        with np.errstate(all="ignore"):
            scaled = np.where(np.isfinite(x), np.clip(x * scale, -largest, largest), f32(np.nan))
        codes = self.format.encode(scaled)
        dequant_scale = np.full((1, 1), f32(1) / scale, np.float32)
        return Quantized(codes, self.format.values[codes], dequant_scale, np.broadcast_to(dequant_scale, x.shape))

    def saved(self) -> dict[str, torch.Tensor]:
        """The slot as the scaling state saves it: the n-th amax that entered lies at n modulo L."""
        ring = np.zeros(self.rule.amax_history_len, np.float32)
        for number, amax in enumerate(self.entered):
            ring[number % len(ring)] = amax
        return {
            "scale": torch.tensor(self.quant_scale),
            "amax_history": torch.from_numpy(ring),
            "counts": torch.tensor([self.passes, len(self.entered)], dtype=torch.int32),
            "largest": torch.tensor(f32(self.format.max)),
        }


@dataclasses.dataclass(frozen=True)
class Product:
    """A gemm of FP8 operands: exact, and how far an FP32 sum may be from it."""

    left: Quantized
    right: Quantized

    def check(self, found: torch.Tensor, where: np.ndarray | None = None) -> None:
        """The same numbers to the roundoff of the sum, NaN for NaN; ``where``: only there."""
        with np.errstate(invalid="ignore"):
            exact, bound = gemm(self.left, self.right), worst_fp32_error(self.left, self.right)
        found = to_numpy(found)
        where = np.ones(exact.shape, bool) if where is None else where
        np.testing.assert_array_equal(np.isnan(found[where]), np.isnan(exact[where]))
        finite = where & ~np.isnan(exact)
        assert (np.abs(found - exact)[finite] <= bound[finite] + 2.0**-140).all(), "other operands were multiplied"


class Layer:
    """Slots of ``y = x @ w.T`` and its gradients."""

    def __init__(self, rule: Rule) -> None:
        self.input, self.weight, self.grad_output = Slot(rule, E4M3), Slot(rule, E4M3), Slot(rule, E5M2)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> Product:
        self._x, self._w = self.input.see(x), self.weight.see(weight)
        return Product(self._x, self._w)

    def backward(self, grad_output: torch.Tensor) -> tuple[Product, Product]:
        """grad_input and grad_weight, with the operands that forward quantized."""
        dy = self.grad_output.see(grad_output)
        return Product(dy, _turned(self._w)), Product(_turned(dy), _turned(self._x))

    def saved(self, name: str) -> dict[str, torch.Tensor]:
        slots = {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}
        return {
            f"{name}#0.{role}.{field}": tensor for role, slot in slots.items() for field, tensor in slot.saved().items()
        }


def _turned(q: Quantized) -> Quantized:
    return Quantized(q.codes.T, q.values.T, q.dequant_scale.T, q.scale_of_element.T)
