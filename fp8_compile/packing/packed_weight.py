"""What modules with packed weights have in common: how the parts move, are saved and are loaded.

``state_dict()`` holds the packed parts in the standard layout, ``load_state_dict`` takes them, ``to`` and ``cuda`` move
them (casts to another dtype leave them alone). In the memory of a CPU, NVFP4 is stored in the order in which the CPU's
kernels read it, in as many bytes; ``layout`` names the order.
"""

from __future__ import annotations

from typing import Any, Callable, Protocol, Self

import torch
from torch import Tensor, nn

from fp8_compile.kernels.cpu.large_pages import in_large_pages
from fp8_compile.kernels.nvfp4 import ops


class Matrix(Protocol):
    """A packed [N, K] matrix outside of a module: ``NVFP4Weight``, ``FP8Weight``."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dequantize(self, dtype: torch.dtype = ...) -> Tensor: ...

    def to(self, device: torch.device | str) -> Self: ...


class PackedWeight(nn.Module):
    """A module whose weight is stored in buffers of packed bytes."""

    dtype: torch.dtype  # of the weight before it was packed
    packed: tuple[str, ...] = ()  # buffers that hold the weight
    matrix_type: Callable[..., Any]  # makes a matrix of those parts

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        raise NotImplementedError

    def memory_bytes(self) -> int:
        """How many bytes the weight takes."""
        return sum(getattr(self, name).nbytes for name in self.packed)

    @property
    def is_sharded(self) -> bool:
        """True if this rank has only a part of the weight."""
        return False

    def reason_against_export(self) -> str | None:
        """Why no CPU kernel that a package could hold reads this weight, or None."""
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to the packed parts as bytes: it moves them, but can't cast them."""
        parts = {name: part for name in self.packed if (part := self._buffers.get(name)) is not None}
        for name in parts:
            del self._buffers[name]
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(parts)
        for name, value in parts.items():
            given = value.reshape(-1).view(torch.uint8)
            moved = fn(given)
            if moved is not given:  # or layers that share a tensor would have one each
                self._buffers[name] = moved.view(value.dtype).reshape(value.shape)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype  # a layer without bias follows casts, too
        return self


    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take the parts as they are here, or as bytes in another shape (``shardable.py``)."""
        held = {**self._parameters, **self._buffers}
        for name in self.packed:
            part, own = state_dict.get(prefix + name), held.get(name)
            if part is None or own is None or part.nbytes != own.nbytes:
                continue
            if part.shape != own.shape or (part.dtype != own.dtype and torch.uint8 in (part.dtype, own.dtype)):
                state_dict[prefix + name] = part.contiguous().view(torch.uint8).view(own.dtype).reshape(own.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class NVFP4Parts(PackedWeight):
    """NVFP4 of one matrix, or of a stack of them: codes uint8 [..., N, K'/2], block_scales e4m3 [..., N, K'/B],
    global_scale fp32 [...]; K' is K in whole blocks."""

    packed = ("codes", "block_scales", "global_scale")
    codes: Tensor
    block_scales: Tensor
    global_scale: Tensor
    activations: str | None = None
    layout: str
    block_size: int

    def use_layout(self, layout: str) -> None:
        """Store the weight in another layout, in place of what was there."""
        if layout != self.layout:
            standard = ops.to_standard(self.codes, self.block_scales, self.layout)
            laid_out = ops.from_standard(*standard, layout)
            if layout == ops.INTERLEAVED:  # for a CPU's kernels
                laid_out = in_large_pages(laid_out[0]), in_large_pages(laid_out[1])
            self.codes, self.block_scales = laid_out
            self.layout = layout

    def use_best_layout(self) -> None:
        """Store the weight as the kernels of its device read it; a weight on the meta device stays as it is."""
        if self.codes.device.type != "meta":
            self.use_layout(ops.layout_for(self.codes.device, self.block_size, self.activations))

    def reason_against_export(self) -> str | None:
        if self.layout == ops.INTERLEAVED:
            return None
        return (
            f"NVFP4 with block_size={self.block_size} and activations={self.activations!r} has no CPU kernel to "
            "export; pack it with block_size=16 and activations=None or 'int8'"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.use_best_layout()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != ops.STANDARD:
            standard = ops.to_standard(self.codes, self.block_scales, self.layout)
            destination[prefix + "codes"], destination[prefix + "block_scales"] = standard

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        layout = self.layout
        self.use_layout(ops.STANDARD)  # the layout of state_dicts
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.use_layout(layout)
