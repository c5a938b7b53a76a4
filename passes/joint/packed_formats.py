"""The operations of each format of packed weights: a new format is a new object, and an entry in ``FORMATS``.

    dequantize(*parts, dtype, ...)                    what a packed layer multiplies by         -> w [N, K]
    dequantize_experts(*parts, dtype, ..., which)     what packed experts multiply by           -> w [E, N, K]
    multiply, multiply_experts                        the products that read the packed form
    multiply_grad, multiply_experts_grad              the same of gradients: grad @ w, the gradient of the inputs
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch
from torch import fx

from fp8_compile.kernels import experts, fp8_blocks, fp8_inputs, fp8_weight, mx_weight
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.formats import E4M3
from fp8_compile.kernels.mxfp8 import mx_mm_op, quantize_mx_op
from fp8_compile.kernels.nvfp4 import ops as nvfp4
from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.torch_internals.graphs import OpOverload

from ..graph.emit import emit, getitem, inline, value
from ..graph.marks import Kind, Mark
from .multiply_fp8 import multiply_fp8, reason_against_fp8

aten, prims = torch.ops.aten, torch.ops.prims


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How the inputs of a layer are rounded before they are multiplied."""

    activations: str
    scale: fx.Node | None = None  # where it is static


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a packed layer multiplies: ``round(x) @ dequantize.T + bias``; rounding and bias may be missing."""

    x: fx.Node
    dequantize: fx.Node
    bias: fx.Node | None
    rounding: Rounding | None

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """(M, N, K)."""
        m, k = value(self.x).shape
        return m, value(self.dequantize).shape[0], k


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a row says about the inputs of a product."""

    format: str
    words: str = ""  # more about them, after a comma


class PackedFormat(abc.ABC):
    """A format of packed weights."""

    name: ClassVar[str]
    values: ClassVar[str]  # what a weight's codes are, in rows
    dequantize: OpOverload
    dequantize_experts: OpOverload | None  # None: no product reads packed experts
    experts_arguments: ClassVar[int]  # of ``dequantize_experts``, before ``which``
    round: OpOverload  # of a layer's inputs; the first argument is what is rounded

    @abc.abstractmethod
    def rounding(self, node: fx.Node) -> Rounding:
        """What a node of ``round`` does."""

    rounds_experts: ClassVar[bool] = False  # True: what experts multiply is rounded
    multiplies_experts: ClassVar[bool] = True  # False: no product reads such a stack, on any target

    def multiplies(self, operands: Operands, target: str) -> bool:
        """True if there is a product that reads the packed form for such operands."""
        return True

    def multiplies_grad(self) -> bool:
        """The same for gradients."""
        return True

    @abc.abstractmethod
    def inputs(self, operands: Operands, target: str) -> Inputs:
        """What the inputs of a layer are rounded to."""

    def inputs_of_experts(self, x: fx.Node, dequantize: fx.Node) -> Inputs:
        """The same of experts."""
        return Inputs(dtype_name(x))

    def round_rows(self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, *, like: fx.Node) -> fx.Node:
        """x [M, K] as experts that round it have to see it, where no product of ours does it."""
        raise AssertionError(f"inputs of experts in {self.name} are exact")

    @abc.abstractmethod
    def multiply(self, graph: fx.Graph, operands: Operands, target: str, *, like: fx.Node) -> fx.Node:
        """The product of a layer, from the packed form."""

    @abc.abstractmethod
    def multiply_experts(
        self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        """``x[row] @ dequantize[expert of the row].T``, from the packed form; see ``kernels/experts.py``."""

    @abc.abstractmethod
    def multiply_grad(self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, *, like: fx.Node) -> fx.Node:
        """``grad @ dequantize``, from the packed form."""

    @abc.abstractmethod
    def multiply_experts_grad(
        self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        """``grad[row] @ dequantize[expert of the row]``, from the packed form."""


class NVFP4(PackedFormat):
    name, values = "nvfp4", "e2m1"
    dequantize, dequantize_experts, experts_arguments = nvfp4.dequantize_op, experts.nvfp4_dequantize_op, 6
    round = nvfp4.round_activations_op

    def rounding(self, node: fx.Node) -> Rounding:
        return Rounding(str(node.args[1]))

    def inputs(self, operands: Operands, target: str) -> Inputs:
        return Inputs(operands.rounding.activations if operands.rounding else dtype_name(operands.x))

    def multiply(self, graph: fx.Graph, operands: Operands, target: str, *, like: fx.Node) -> fx.Node:
        codes, block_scales, global_scale, _, _, layout = operands.dequantize.args
        packed = codes, block_scales, global_scale
        activations = operands.rounding.activations if operands.rounding else None
        return emit(graph, nvfp4.mm_op, operands.x, *packed, operands.bias, activations, layout, like=like)

    def multiply_experts(
        self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        codes, block_scales, global_scale, _, _, layout = dequantize.args
        packed = codes, block_scales, global_scale
        return emit(graph, experts.nvfp4_mm_op, x, *packed, which, rows, layout, like=like)

    def multiply_grad(self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, *, like: fx.Node) -> fx.Node:
        codes, block_scales, global_scale, columns, _, layout = dequantize.args
        return emit(graph, nvfp4.mm_grad_op, grad, codes, block_scales, global_scale, columns, layout, like=like)

    def multiply_experts_grad(
        self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        codes, block_scales, global_scale, columns, _, layout = dequantize.args
        packed = codes, block_scales, global_scale
        return emit(graph, experts.nvfp4_mm_grad_op, grad, *packed, which, rows, columns, layout, like=like)


class FP8(PackedFormat):
    """Where inputs are rounded too, the product is an FP8 gemm, if the target has one for its sizes."""

    name, values = "fp8", "e4m3"
    dequantize, dequantize_experts, experts_arguments = fp8_weight.dequantize_op, experts.fp8_dequantize_op, 3
    round = fp8_inputs.round_inputs_op

    def rounding(self, node: fx.Node) -> Rounding:
        scale = node.args[1]
        return Rounding("fp8", scale if isinstance(scale, fx.Node) else None)

    def inputs(self, operands: Operands, target: str) -> Inputs:
        own = dtype_name(operands.x)
        if operands.rounding is None:
            return Inputs(own)
        words = "dynamic scale a row" if operands.rounding.scale is None else "static scale"
        against = reason_against_fp8(operands.shape, target)
        return Inputs("e4m3", f"{words}; multiplied in {own}: {against}" if against else words)

    def multiply(self, graph: fx.Graph, operands: Operands, target: str, *, like: fx.Node) -> fx.Node:
        codes, scales, _ = operands.dequantize.args
        x, bias, rounding = operands.x, operands.bias, operands.rounding
        if rounding is not None:
            if reason_against_fp8(operands.shape, target) is None:
                return multiply_fp8(graph, x, rounding.scale, codes, scales, bias, target, like=like)
            x = emit(graph, fp8_inputs.round_inputs_op, x, rounding.scale, like=like)
        return emit(graph, fp8_weight.mm_op, x, codes, scales, bias, like=like)

    def multiply_experts(
        self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        codes, scales, _ = dequantize.args
        return emit(graph, experts.fp8_mm_op, x, codes, scales, which, rows, like=like)

    def multiply_grad(self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, *, like: fx.Node) -> fx.Node:
        codes, scales, _ = dequantize.args
        return emit(graph, fp8_weight.mm_grad_op, grad, codes, scales, like=like)

    def multiply_experts_grad(
        self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        codes, scales, *_ = dequantize.args
        return emit(graph, experts.fp8_mm_grad_op, grad, codes, scales, which, rows, like=like)


class FP8RoundingExperts(FP8):
    """Experts whose inputs are rounded, as ``recipe="delayed"`` and ``"rowwise"`` train them. With a static scale the
    product reads the codes of inputs, and the scales are multiplied: nothing rounds in between."""

    dequantize_experts, experts_arguments = experts.fp8_dequantize_rounding_op, 4
    rounds_experts = True

    def inputs_of_experts(self, x: fx.Node, dequantize: fx.Node) -> Inputs:
        return Inputs("e4m3", "dynamic scale a row" if dequantize.args[2] is None else "static scale")

    def multiply_experts(
        self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        codes, scales, input_scale, _ = dequantize.args
        both, dtype = emit(graph, fp8_inputs.quantize_inputs_op, x, input_scale, like=like), value(x).dtype
        q, scale = getitem(graph, both, 0), getitem(graph, both, 1)
        if input_scale is None:
            x = inline(graph, _dequantized_rows, q, scale, dtype, like=like)
        else:
            x = emit(graph, prims.convert_element_type.default, q, dtype, like=like)
            scales = emit(graph, aten.mul.Tensor, scales, input_scale, like=like)
        return emit(graph, experts.fp8_mm_op, x, codes, scales, which, rows, like=like)

    def round_rows(self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, *, like: fx.Node) -> fx.Node:
        return emit(graph, fp8_inputs.round_inputs_op, x, dequantize.args[2], like=like)


def _dequantized_rows(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (q.to(torch.float32) * scale).to(dtype)


class BlockScaled(PackedFormat):
    """FP8 by blocks, as training has it: where inputs are rounded too, the product is training's own. With exact
    inputs, in backward, and on GPUs the weight is dequantized, as experts of such formats are everywhere."""

    dequantize_experts, experts_arguments = None, 0

    def rounding(self, node: fx.Node) -> Rounding:
        return Rounding(self.name)

    def multiplies(self, operands: Operands, target: str) -> bool:
        return operands.rounding is not None and target == "cpu"

    def multiplies_grad(self) -> bool:
        return False

    def inputs(self, operands: Operands, target: str) -> Inputs:
        return Inputs("e4m3", self.words)

    def multiply_experts(
        self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        raise AssertionError(f"experts in {self.name} are dequantized")

    def multiply_grad(self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, *, like: fx.Node) -> fx.Node:
        raise AssertionError(f"{self.name} is dequantized in backward")

    def multiply_experts_grad(
        self, graph: fx.Graph, grad: fx.Node, dequantize: fx.Node, which: fx.Node, rows: str, *, like: fx.Node
    ) -> fx.Node:
        raise AssertionError(f"experts in {self.name} are dequantized")

    words: ClassVar[str]


class FP8Blocks(BlockScaled):
    name, values, words = "fp8_blocks", "e4m3", "a scale per 128 values"
    dequantize, round = fp8_blocks.dequantize_op, fp8_blocks.round_inputs_op

    def multiply(self, graph: fx.Graph, operands: Operands, target: str, *, like: fx.Node) -> fx.Node:
        codes, scales, _ = operands.dequantize.args
        both = emit(graph, quantize_op, operands.x, E4M3.dtype, list(fp8_blocks.INPUTS), like=like)
        q, scale = getitem(graph, both, 0), getitem(graph, both, 1)
        right, scale_right = (emit(graph, aten.permute.default, one, [1, 0], like=like) for one in (codes, scales))
        sides = q, right, scale, scale_right, operands.bias
        return emit(graph, scaled_mm_op, *sides, value(like).dtype, like=like, mark=Mark(kind=Kind.GEMM))


class MXFP8(BlockScaled):
    name, values, words = "mxfp8", "e4m3", "a power of two per 32 values"
    dequantize, round = mx_weight.dequantize_op, mx_weight.round_inputs_op

    def multiply(self, graph: fx.Graph, operands: Operands, target: str, *, like: fx.Node) -> fx.Node:
        codes, scales, _ = operands.dequantize.args
        both = emit(graph, quantize_mx_op, operands.x, list(mx_weight.INPUTS), like=like)
        q, scale = getitem(graph, both, 0), getitem(graph, both, 1)
        right, scale_right = (emit(graph, aten.permute.default, one, [1, 0], like=like) for one in (codes, scales))
        sides = q, right, scale, scale_right, operands.bias
        return emit(graph, mx_mm_op, *sides, value(like).dtype, like=like, mark=Mark(kind=Kind.GEMM))


class MXFP8RoundingExperts(MXFP8):
    """Experts whose inputs are rounded, as ``recipe="mxfp8"`` trains them. The product is the module's own."""

    dequantize_experts, experts_arguments = mx_weight.dequantize_rounding_op, 3
    rounds_experts, multiplies_experts = True, False

    def round_rows(self, graph: fx.Graph, x: fx.Node, dequantize: fx.Node, *, like: fx.Node) -> fx.Node:
        return emit(graph, mx_weight.round_inputs_op, x, like=like)


FORMATS: tuple[PackedFormat, ...] = (NVFP4(), FP8(), FP8Blocks(), MXFP8())
OF_LAYERS: dict[object, PackedFormat] = {format.dequantize: format for format in FORMATS}
OF_EXPERTS: dict[object, PackedFormat] = {
    format.dequantize_experts: format
    for format in (*FORMATS, FP8RoundingExperts(), MXFP8RoundingExperts())
    if format.dequantize_experts is not None
}


def dtype_name(node: fx.Node) -> str:
    return str(value(node).dtype).removeprefix("torch.")
