"""Operations of ours that the partitioner takes for cheap, as it does pointwise operations of its own.

    RECOMPUTED    made again in backward, where that saves memory
    FUSED         counted as read by the kernel that computes their operand

The partitioner saves for backward what an operation that it does not know reads or returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from fp8_compile.kernels.cpu.quantize import cast_op, quantize_delayed_op, scales_op
from fp8_compile.kernels.recompute_copy import recompute_copy_op
from fp8_compile.torch_internals.patches import extends

RECOMPUTED = (cast_op, recompute_copy_op)
FUSED = (*RECOMPUTED, scales_op, quantize_delayed_op)


@extends("cheap_ops", "torch._functorch.partitioners.get_default_op_list")
def _op_list(original: Callable[[], Any]) -> Any:
    found = original()
    return dataclasses.replace(
        found,
        recomputable_ops=found.recomputable_ops | _packets(RECOMPUTED),
        fusible_ops=found.fusible_ops | _packets(FUSED),
    )


@extends("cheap_ops", "torch._functorch.partitioners.is_non_builtin_to_include")
def _is_heavy(original: Callable[[fx.Node], bool], node: fx.Node) -> bool:
    """True for an operation that is weighed before it is made again to save memory."""
    return node.target not in RECOMPUTED and original(node)


def _packets(ops: tuple[Any, ...]) -> set[Any]:
    return {op.overloadpacket for op in ops}
