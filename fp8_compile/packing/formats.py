"""The formats of packed weights. A format is one object, which knows

    how a matrix is quantized: methods, options, what is shared by layers that servers fuse
    which modules hold it: a linear layer, a stack of experts
    what inputs may be rounded to
    how checkpoints store it: the layouts of ``checkpoints/layouts.py``

A new format is a new subclass with its module classes and layouts, and an entry in ``FORMATS``. (How a compiled graph
multiplies by it is one entry in the table of ``passes/joint/packed_formats.py``.)
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from typing import Any, Callable, ClassVar, Generic, Iterable, Mapping, Sequence, TypeVar

import torch
from torch import Tensor, nn

from fp8_compile.kernels import fp8_blocks, fp8_inputs, fp8_weight, mx_weight
from fp8_compile.kernels.fp8_blocks import FP8Blocks
from fp8_compile.kernels.fp8_weight import FP8Weight
from fp8_compile.kernels.mx_weight import MXWeight
from fp8_compile.kernels.nvfp4 import ops as nvfp4
from fp8_compile.kernels.nvfp4.quantize import METHODS, NEED_HESSIAN, check_method, own_global_scale, quantize_nvfp4
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight, with_global_scale
from fp8_compile.kernels.scaled_codes import ScaledCodes

from .calibration import Calibration
from .checkpoints.block_layouts import BLOCK_LAYOUTS
from .checkpoints.layouts import FP8_LAYOUTS, NVFP4_LAYOUTS, Layout
from .checkpoints.mx_layouts import MX_LAYOUTS
from .input_scales import static_scales
from .linear_layers import fused_groups
from .packed_block_scaled import FP8BlockLinear, FP8BlockStack, MXFP8Linear, MXFP8Stack
from .packed_experts import FP8Stack, NVFP4Stack, PackedStack
from .packed_linear import FP8Linear, NVFP4Linear, PackedLinear
from .packed_weight import Matrix

log = logging.getLogger("fp8_compile")
M = TypeVar("M", bound=Matrix)
C = TypeVar("C", bound=ScaledCodes)
MatrixOf = Callable[[str], Tensor]  # the weight of a layer by its name


class Format(abc.ABC, Generic[M]):
    """A format of packed weights; ``M`` is a matrix in it."""

    name: ClassVar[str]  # as the user writes it
    title: ClassVar[str]  # in sentences
    weights: ClassVar[str]  # what a checkpoint holds, in sentences
    matrix: type[M]
    linear: type[PackedLinear]
    stack: type[PackedStack]
    activations: ClassVar[tuple[str | None, ...]]
    layouts: tuple[Layout[M], ...]
    fallback: ClassVar[str]  # the method for a matrix that has no Hessian where its method needs one
    measures_on_inputs: ClassVar[bool]  # True if errors are the output's wherever there is a calibration

    @abc.abstractmethod
    def check(self, method: str | None, options: Mapping[str, Any], activations: str | None, calibrated: bool) -> None:
        """Raise a ValueError for arguments of ``pack`` that are not for this format."""

    @abc.abstractmethod
    def method(self, asked: str | None, calibrated: bool) -> str:
        """The method to use: the one that was asked for, or the default."""

    def check_method(self, method: str, calibrated: bool, layer: str) -> None:
        """Raise a ValueError where the method needs a calibration and there is none; ``layer`` is named in it."""

    def needs_hessian(self, method: str) -> bool:
        """True if the method weighs errors by the layer's inputs."""
        return False

    @abc.abstractmethod
    def quantize(
        self, w: Tensor, method: str, hessian: Tensor | None, *, name: str, shared: Tensor | None = None, **options: Any
    ) -> M:
        """The matrix in this format. ``shared`` is what ``shared_scales`` has for it; ``options`` are those of the
        method, and ``block_size``."""

    def shared_scales(self, names: Iterable[str], matrix_of: MatrixOf, method: str) -> dict[str, Tensor]:
        """The scale that layers which servers fuse have in common, by name; nothing where each has its own."""
        return {}

    def input_scales(self, names: Iterable[str], calibration: Calibration) -> dict[str, Tensor]:
        """Static scales of the layers' inputs, by name; nothing where inputs need none."""
        return {}

    @abc.abstractmethod
    def rows(self, matrix: M, rows: slice | Tensor) -> M:
        """Some rows of a matrix, a run of them or by their numbers, in memory of their own."""

    @abc.abstractmethod
    def concatenate(self, matrices: Sequence[M], name: str) -> M:
        """The rows of all the matrices, one matrix after the other."""

    def fuse(self, matrices: dict[str, M]) -> None:
        """Give layers that servers fuse what they must have in common in a checkpoint, in place of what they have."""

    def layout(self, name: str, layer: str) -> Layout[M]:
        """The layout of that name; a ValueError that names the layer where this format has none."""
        found = next((layout for layout in self.layouts if layout.name == name), None)
        if found is None:
            expected = " or ".join(f"layout={layout.name!r}" for layout in self.layouts)
            raise ValueError(f"{layer}: {self.weights} are stored by {expected}, got {name!r}")
        return found


class NVFP4Format(Format[NVFP4Weight]):
    """E2M1 in blocks with an E4M3 scale each, and one FP32 scale for the matrix."""

    name, title, weights = "nvfp4", "NVFP4", "NVFP4 weights"
    matrix, linear, stack = NVFP4Weight, NVFP4Linear, NVFP4Stack
    activations = nvfp4.ACTIVATIONS
    layouts = NVFP4_LAYOUTS
    fallback = "sweep"
    measures_on_inputs = False

    def check(self, method: str | None, options: Mapping[str, Any], activations: str | None, calibrated: bool) -> None:
        if method is not None and method not in METHODS:
            check_method(method, True, "pack")

    def method(self, asked: str | None, calibrated: bool) -> str:
        return asked or ("gptq" if calibrated else "sweep")

    def check_method(self, method: str, calibrated: bool, layer: str) -> None:
        check_method(method, calibrated, layer)

    def needs_hessian(self, method: str) -> bool:
        return method in NEED_HESSIAN

    def quantize(
        self, w: Tensor, method: str, hessian: Tensor | None, *, name: str, shared: Tensor | None = None, **options: Any
    ) -> NVFP4Weight:
        return quantize_nvfp4(w, method, hessian, name=name, global_scale=shared, **options)

    def shared_scales(self, names: Iterable[str], matrix_of: MatrixOf, method: str) -> dict[str, Tensor]:
        """One global scale per group: the largest of its layers'."""
        shared = {}
        for group in fused_groups(names):
            largest = torch.stack([own_global_scale(matrix_of(name), method) for name in group]).amax()
            if largest.isfinite():  # or the layer that is not says so itself
                shared.update(dict.fromkeys(group, largest))
        return shared

    def rows(self, matrix: NVFP4Weight, rows: slice | Tensor) -> NVFP4Weight:
        codes, block_scales = matrix.codes[rows].contiguous(), matrix.block_scales[rows].contiguous()
        return NVFP4Weight(codes, block_scales, matrix.global_scale, matrix.columns)

    def concatenate(self, matrices: Sequence[NVFP4Weight], name: str) -> NVFP4Weight:
        scale = torch.stack([one.global_scale for one in matrices]).amax()
        if any(not torch.equal(one.global_scale, scale) for one in matrices):
            same = by_one_scale(matrices)
            if same is not None:
                return self.concatenate(same, name)
            log.warning("%s: its parts given one global scale, their block scales searched again", name)
            whole = torch.cat([one.dequantize() for one in matrices])
            return quantize_nvfp4(whole, "sweep", global_scale=scale, name=name)
        codes, block_scales = (torch.cat([getattr(one, part) for one in matrices]) for part in self.stack.packed[:2])
        return NVFP4Weight(codes, block_scales, scale, matrices[0].columns)

    def fuse(self, matrices: dict[str, NVFP4Weight]) -> None:
        for group in fused_groups(matrices):
            scales = [matrices[name].global_scale for name in group]
            if all(torch.equal(scale, scales[0]) for scale in scales):
                continue
            same = by_one_scale([matrices[name] for name in group])
            if same is not None:
                matrices.update(zip(group, same))
                continue
            shared = torch.stack([scale.cpu() for scale in scales]).amax()
            log.warning("%s: given one global scale, their block scales searched again", ", ".join(group))
            for name in group:
                matrices[name] = quantize_nvfp4(matrices[name].dequantize(), "sweep", global_scale=shared, name=name)


def by_one_scale(weights: Sequence[NVFP4Weight]) -> list[NVFP4Weight] | None:
    """The same numbers by one global scale, one of theirs; None where no such scale gives all of them exactly."""
    for scale in dict.fromkeys(float(one.global_scale) for one in weights):
        found = [with_global_scale(one, torch.tensor(scale)) for one in weights]
        same = [one for one in found if one is not None]
        if len(same) == len(weights):
            return same
    return None


class ScaledCodesFormat(Format[C]):
    """E4M3 with scales, rounded to nearest: a matrix is a tuple of codes and scales."""

    fallback = "rtn"
    measures_on_inputs = False

    def check(self, method: str | None, options: Mapping[str, Any], activations: str | None, calibrated: bool) -> None:
        if method not in (None, "rtn") or options or calibrated:
            raise ValueError(f"format={self.name!r} has one method, 'rtn', without more; leave the rest out")

    def method(self, asked: str | None, calibrated: bool) -> str:
        return "rtn"

    def quantize(
        self, w: Tensor, method: str, hessian: Tensor | None, *, name: str, shared: Tensor | None = None, **options: Any
    ) -> C:
        return self.rounded(w, name)

    @abc.abstractmethod
    def rounded(self, w: Tensor, name: str) -> C:
        """The matrix rounded to nearest."""

    def rows(self, matrix: C, rows: slice | Tensor) -> C:
        return self.matrix(matrix.codes[rows].contiguous(), matrix.scales[rows].contiguous())

    def concatenate(self, matrices: Sequence[C], name: str) -> C:
        return self.matrix(*(torch.cat(parts) for parts in zip(*matrices)))


class FP8Format(ScaledCodesFormat[FP8Weight]):
    """E4M3 with one scale per row."""

    name, title, weights = "fp8", "FP8", "FP8 weights with one scale per row"
    matrix, linear, stack = FP8Weight, FP8Linear, FP8Stack
    activations = fp8_inputs.ACTIVATIONS
    layouts = FP8_LAYOUTS
    measures_on_inputs = True

    def check(self, method: str | None, options: Mapping[str, Any], activations: str | None, calibrated: bool) -> None:
        super().check(method, options, activations, False)
        if calibrated and activations is None:
            raise ValueError(
                "calibration: of format='fp8' it gives the inputs their scales, but activations=None keeps inputs "
                "exact; say activations='fp8', or leave the calibration out"
            )

    def rounded(self, w: Tensor, name: str) -> FP8Weight:
        return fp8_weight.quantize(w, name)

    def input_scales(self, names: Iterable[str], calibration: Calibration) -> dict[str, Tensor]:
        return static_scales(names, calibration)


class FP8BlocksFormat(ScaledCodesFormat[FP8Blocks]):
    """E4M3 with one scale per block of 128 x 128: what DeepSeek and Qwen publish."""

    name, title, weights = "fp8_blocks", "FP8 by blocks", "FP8 weights by blocks of 128 x 128"
    matrix, linear, stack = FP8Blocks, FP8BlockLinear, FP8BlockStack
    activations = fp8_blocks.ACTIVATIONS
    layouts = BLOCK_LAYOUTS

    def rounded(self, w: Tensor, name: str) -> FP8Blocks:
        return fp8_blocks.quantize(w, name)

    def rows(self, matrix: FP8Blocks, rows: slice | Tensor) -> FP8Blocks:
        if isinstance(rows, Tensor):
            raise ValueError(
                "checkpoints of this model have the rows of a weight in another order, which tears blocks of 128 rows "
                "apart; exclude the layer from packing, or pack it with format='fp8'"
            )
        first, last = rows.start // fp8_blocks.BLOCK, -(-rows.stop // fp8_blocks.BLOCK)
        if rows.start % fp8_blocks.BLOCK:
            raise ValueError(
                f"rows from {rows.start} on are no whole blocks of 128, so gate and up of an expert can't be stored "
                "apart; exclude the experts from packing, or pack them with format='fp8'"
            )
        return FP8Blocks(matrix.codes[rows].contiguous(), matrix.scales[first:last].contiguous())

    def concatenate(self, matrices: Sequence[FP8Blocks], name: str) -> FP8Blocks:
        if any(one.shape[0] % fp8_blocks.BLOCK for one in matrices[:-1]):
            log.warning("%s: gate and up are no whole blocks of 128 rows, rounded again as one matrix", name)
            return self.rounded(torch.cat([one.dequantize() for one in matrices]), name)
        return super().concatenate(matrices, name)


class MXFP8Format(ScaledCodesFormat[MXWeight]):
    """E4M3 with one power of two per 32 values along K, or per tile of 32 x 32."""

    name, title, weights = "mxfp8", "MXFP8", "MXFP8 weights"
    matrix, linear, stack = MXWeight, MXFP8Linear, MXFP8Stack
    activations = mx_weight.ACTIVATIONS
    layouts = MX_LAYOUTS

    def rounded(self, w: Tensor, name: str) -> MXWeight:
        return mx_weight.quantize(w, name)

    def rows(self, matrix: MXWeight, rows: slice | Tensor) -> MXWeight:
        return super().rows(mx_weight.by_rows(matrix), rows)

    def concatenate(self, matrices: Sequence[MXWeight], name: str) -> MXWeight:
        return super().concatenate([mx_weight.by_rows(one) for one in matrices], name)


NVFP4, FP8, FP8_BLOCKS, MXFP8 = NVFP4Format(), FP8Format(), FP8BlocksFormat(), MXFP8Format()
FORMATS: dict[str, Format[Any]] = {format.name: format for format in (NVFP4, FP8, FP8_BLOCKS, MXFP8)}


def format_of(module: nn.Module) -> Format[Any]:
    """The format of a packed layer or stack."""
    return next(format for format in FORMATS.values() if isinstance(module, (format.linear, format.stack)))


def format_of_matrix(matrix: Matrix) -> Format[Any]:
    return next(format for format in FORMATS.values() if isinstance(matrix, format.matrix))


@dataclasses.dataclass(frozen=True)
class Settings:
    """How weights are packed: the arguments of ``pack``, checked, with their defaults."""

    format: Format[Any]
    method: str
    activations: str | None
    block_size: int
    options: Mapping[str, Any]

    def without_hessian(self) -> Settings:
        """The settings for a matrix whose inputs are not known, where the method needs them."""
        return dataclasses.replace(self, method=self.format.fallback, options={})

    def quantize(self, w: Tensor, hessian: Tensor | None, *, name: str, shared: Tensor | None) -> Any:
        """One matrix in the format."""
        options = {"block_size": self.block_size, **self.options}
        return self.format.quantize(w, self.method, hessian, name=name, shared=shared, **options)
