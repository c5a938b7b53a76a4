"""Pack the stacks of matrices of a mixture of experts, each matrix as a linear layer's.

gate_up_proj holds gate and up of an expert in one matrix: they have one global scale, as servers want it. Inputs of
experts stay exact, whatever ``activations`` are: what multiplies them is the module's own forward.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from fp8_compile.kernels import fp8_weight
from fp8_compile.kernels.nvfp4.quantize import NEED_HESSIAN, quantize_nvfp4

from .expert_stacks import ExpertStack
from .pack_report import PackRow
from .packed_experts import FP8Stack, NVFP4Stack, PackedStack, replace_stack

FALLBACK = "sweep"  # for matrices that a method has no Hessian for


class StackPacker:
    """Packs ``stacks`` one after the other; those that are tied share what the first became."""

    def __init__(
        self,
        stacks: Mapping[str, ExpertStack],
        format: str,
        method: str,
        activations: str | None,
        block_size: int,
        options: dict[str, Any],
    ) -> None:
        self.format, self.method, self.block_size, self.options = format, method, block_size, options
        self.inputs = "" if activations is None else "inputs exact"
        self.stacks, counts = stacks, Counter(id(stack.parameter) for stack in stacks.values())
        self.tied = {key for key, count in counts.items() if count > 1}
        self.done: dict[int, PackedStack] = {}  # by id of the parameter, of tied ones

    def pack(self, name: str, hessian_of: Callable[[int], Tensor | None]) -> PackRow:
        """``hessian_of(expert)``: of the inputs of one expert; None where no token went to it."""
        stack = self.stacks[name]
        parameter, matrices = stack.parameter, stack.matrices
        shape, before = tuple(matrices.shape), parameter.nbytes
        if id(parameter) in self.done:
            replace_stack(stack.module, stack.name, self.done[id(parameter)])
            return PackRow(name, shape, self.format, self.method, before, 0, reason=_joined("tied", self.inputs))
        packed, error, unseen = self._packed(name, stack, hessian_of)
        if id(parameter) in self.tied:
            self.done[id(parameter)] = packed
        replace_stack(stack.module, stack.name, packed)
        missing = f"{unseen} of {shape[0]} experts saw no token: packed by {FALLBACK}" if unseen else ""
        method = self.method
        if unseen == shape[0]:
            method, missing = FALLBACK, f"its inputs were not calibrated: packed by {FALLBACK}"
        sizes = before, packed.memory_bytes()
        return PackRow(name, shape, self.format, method, *sizes, error, reason=_joined(missing, self.inputs))

    def _packed(
        self, name: str, stack: ExpertStack, hessian_of: Callable[[int], Tensor | None]
    ) -> tuple[PackedStack, float, int]:
        """The packed stack, its relative error, and how many of its matrices lacked a Hessian that was called for."""
        parts: list[Any] = []
        unseen, powers = 0, {True: torch.zeros(2), False: torch.zeros(2)}  # of error and weight, by whether on inputs
        dtype, matrices = stack.parameter.dtype, stack.matrices
        for expert, matrix in enumerate(matrices):
            own, hessian = f"{name}[{expert}]", hessian_of(expert)
            matrix = matrix.contiguous()
            if self.format == "fp8":
                parts.append(fp8_weight.quantize(matrix, own))
                after = fp8_weight.dequantize(*parts[-1])
            else:
                method, options = self.method, self.options
                if method in NEED_HESSIAN and hessian is None:
                    method, options, unseen = FALLBACK, {}, unseen + 1
                parts.append(
                    quantize_nvfp4(matrix, method, hessian, block_size=self.block_size, name=own, **options)
                )
                after = parts[-1].dequantize()
            pair = _power(after - matrix, hessian).clamp(min=0), _power(matrix.to(torch.float32), hessian)
            powers[hessian is not None] += torch.stack(pair).cpu()
        wrong, whole = powers[bool(powers[True].any())]  # a weight's own error does not compare with an output's
        kind = FP8Stack if self.format == "fp8" else NVFP4Stack
        return kind.of(parts, dtype, stack.transposed), float((wrong / whole.clamp(min=1e-30)).sqrt()), unseen


def _power(w: Tensor, hessian: Tensor | None) -> Tensor:
    """Of the output on the calibration's inputs; of the weight itself where there is none."""
    return (w if hessian is None else w @ hessian.to(w.device)).mul(w).sum()


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))
