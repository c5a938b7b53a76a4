"""Delayed scaling written a second time: NumPy, one slot after the other, lists instead of rings, and no code of
``kernels/``.

A :class:`Slot` follows one tensor through the passes. The slots of a :class:`Page` are updated together: the forward
tensors of a model are one page, its gradients another. A :class:`Model` has both, and a :class:`Layer` does the three
gemms of ``y = x @ w.T`` in FP64 with operands rounded by the tables of ``fp8_reference``. Scales are FP32, in this
order:

    room = sum of ceil(log2(amax * quant_scale / F)) over slots of the page that were saturated and have not been part
           of two passes since, limited by the format; weights neither cause nor get it
    m = max(window), or the newest, or the 99th percentile            window: the last L amaxes that entered
    quant_scale = fl(fl(1 / fl(m * 2**(margin + room))) * F)          both steps capped at the largest FP32
    own scale = fl(fl(1 / amax) * F)                                  capped likewise
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from fp8_reference import E4M3, E5M2, Fp8, Quantized, gemm, to_numpy, worst_fp32_error

f32 = np.float32
LARGEST = f32(np.finfo(np.float32).max)
FIRST_RUNS = 8  # a model waits for the history of a tensor for that many passes

# By mantissa bits: the margin of inputs and gradients (weights have none), the most room after a saturation, and below
# which part of F an amax is too small.
MARGIN = {3: 2, 2: 6}
MOST_ROOM = {3: 6, 2: 12}
SMALL = {3: 2.0**-8, 2: 2.0**-20}


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a scale follows from the amaxes: the options of the recipe, by their names in the config."""

    amax_algorithm: str = "max"
    margin: int = 0
    amax_history_len: int = 16
    scale_update_interval: int = 1

    def __str__(self) -> str:
        return f"{self.amax_algorithm}-{self.margin}-{self.amax_history_len}-{self.scale_update_interval}"

    def margin_of(self, role: str, format: Fp8) -> int:
        return self.margin + (0 if role == "weight" else MARGIN[format.mantissa_bits])

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


def scale_of(m: np.float32, format: Fp8, exponent: int = 0) -> np.float32:
    """The scale by which ``m * 2**exponent`` becomes F."""
    with np.errstate(all="ignore"):
        reach = min(f32(m) * f32(2.0**exponent), LARGEST)
        return min((f32(1) / reach) * f32(format.max), LARGEST)


def saturates(reached: np.float32, format: Fp8) -> bool:
    """Whether a scaled value is beyond what rounds to F: more than half a step above it."""
    below, largest = format.magnitudes[-2:]
    return float(reached) > largest + (largest - below) / 2


def powers_beyond(reached: np.float32, format: Fp8) -> int:
    """ceil(log2(reached / F)), at most 32."""
    with np.errstate(over="ignore"):
        times = float(reached * f32(1 / format.max))
    if math.isinf(times):
        return 32
    fraction, exponent = math.frexp(times)
    return min(exponent - (fraction == 0.5), 32)


class Slot:
    """One tensor, pass after pass: quantizes it with the scale that is known, and records it."""

    def __init__(self, page: Page, margin: int, steady: bool) -> None:
        self.page, self.margin, self.steady, self.look = page, margin, steady, False
        self.over, self.passes_with_room = 0, 0
        self.entered: list[np.float32] = []
        self.quant_scale, self.pending = f32(0), None
        self.passes = self.saturated = self.clipped = self.small = 0

    def see(self, x: np.ndarray | torch.Tensor) -> Quantized:
        x = to_numpy(x, np.float32)
        amax = np.max(np.abs(x))  # NaN if there is one
        quantized = self._quantize(x, self.scale_for(amax))
        self.record(amax)
        return quantized

    def record(self, amax: np.float32) -> None:
        """Remember an amax for the page's next update; a tensor has one in a pass."""
        assert self.pending is None, "the page was not updated between two passes"
        self.pending = f32(amax)

    def scale_for(self, amax: np.float32) -> np.float32:
        """The known scale; without one, or where the tensor is looked at first, that of the tensor itself."""
        if self.quant_scale > 0 and not self.look:
            return self.quant_scale
        return scale_of(amax, self.page.format) if 0 < amax < np.inf else f32(1)

    def count(self, amax: np.float32) -> None:
        """Let an amax enter, and note by how many powers of two the tensor was saturated."""
        format = self.page.format
        self.passes += 1
        self.passes_with_room = max(self.passes_with_room - 1, 0)
        if not np.isfinite(amax):
            return
        self.entered.append(amax)
        if self.look or self.quant_scale == 0:
            return
        with np.errstate(over="ignore"):
            reached = amax * self.quant_scale
        saturated = saturates(reached, format)
        self.saturated += saturated
        self.clipped += float(reached) > 2 * format.max
        self.small += amax > 0 and float(reached) < format.max * SMALL[format.mantissa_bits]
        if saturated and not self.steady:
            self.over, self.passes_with_room = powers_beyond(reached, format), 2

    def rescale(self, room: int, present: bool) -> None:
        rule = self.page.rule
        due = present and (self.passes % rule.scale_update_interval == 0 or self.quant_scale == 0)
        window = self.entered[-rule.amax_history_len :]
        if window and (due or room) and (m := rule.summary(window)) > 0:
            self.quant_scale = scale_of(m, self.page.format, self.margin + room)

    def _quantize(self, x: np.ndarray, scale: np.float32) -> Quantized:
        largest = f32(self.page.format.max)
        with np.errstate(all="ignore"):
            scaled = np.where(np.isfinite(x), np.clip(x * scale, -largest, largest), f32(np.nan))
        codes = self.page.format.encode(scaled)
        dequant_scale = np.full((1, 1), f32(1) / scale, np.float32)
        values = self.page.format.values[codes]
        return Quantized(codes, values, dequant_scale, np.broadcast_to(dequant_scale, x.shape))

    @property
    def dequant_scale(self) -> np.float32:
        return f32(1) / self.quant_scale if self.quant_scale else f32(0)

    @property
    def counters(self) -> list[int]:
        """In the order of the state's rows."""
        seen = [self.passes, len(self.entered), self.saturated, self.clipped, self.small]
        return [*seen, self.over, self.passes_with_room]

    @property
    def ring(self) -> np.ndarray:
        """The history as it is stored: the n-th amax that entered is at n modulo L."""
        ring = np.zeros(self.page.rule.amax_history_len, np.float32)
        for number, amax in enumerate(self.entered):
            ring[number % len(ring)] = amax
        return ring

    def saved(self) -> dict[str, torch.Tensor]:
        """The slot as the scaling state saves it."""
        return {
            "scale": torch.tensor(self.quant_scale),
            "amax_history": torch.from_numpy(self.ring),
            "counts": torch.tensor(self.counters, dtype=torch.int32),
            "largest": torch.tensor(f32(self.page.format.max)),
        }


class Page:
    """Slots of one format, updated together: a saturation gives room to all of them, seen in that pass or not."""

    def __init__(self, rule: Rule, format: Fp8, *, frozen: bool = False) -> None:
        self.rule, self.format, self.frozen = rule, format, frozen
        self.slots: list[Slot] = []

    def slot(self, role: str = "input") -> Slot:
        """Another slot, for a tensor of that role."""
        self.slots.append(Slot(self, self.rule.margin_of(role, self.format), role == "weight"))
        return self.slots[-1]

    def update(self) -> None:
        """End the pass in which the slots were recorded."""
        seen = [slot for slot in self.slots if slot.pending is not None]
        for slot in seen:
            slot.count(slot.pending)
        needed = sum(slot.over for slot in self.slots if slot.passes_with_room)
        room = min(needed, MOST_ROOM[self.format.mantissa_bits])
        if not self.frozen:
            for slot in self.slots:
                slot.rescale(0 if slot.steady else room, slot in seen)
        for slot in seen:
            slot.pending = None


class Model:
    """The two pages of a model that is one graph. It looks at each tensor first until all slots have a history."""

    def __init__(self, rule: Rule) -> None:
        self.forward, self.backward = Page(rule, E4M3), Page(rule, E5M2)

    def end_step(self) -> None:
        """Update both pages, as the next step does when it begins."""
        for page in (self.forward, self.backward):
            page.update()

    def begin_step(self) -> None:
        """Decide how the step gets its scales."""
        slots = [*self.forward.slots, *self.backward.slots]
        look = any(slot.quant_scale == 0 and slot.passes < FIRST_RUNS for slot in slots)
        for slot in slots:
            slot.look = look


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

    def __init__(self, model: Model) -> None:
        self.input, self.weight = model.forward.slot("input"), model.forward.slot("weight")
        self.grad_output = model.backward.slot("grad_output")

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
