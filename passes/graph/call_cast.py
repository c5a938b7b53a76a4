"""A cast to FP8 as one call of our C++, in a graph that is not split yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fp8_compile.kernels.cpu.quantize import cast_op

from .emit import emit


def call_cast(
    graph: fx.Graph, x: fx.Node, quant_scale: fx.Node, dtype: torch.dtype, block: Sequence[int], *, like: fx.Node
) -> fx.Node:
    """``cast(x, quant_scale)``, which the partitioner may let backward make again.

    The scale is named because the partitioner takes an operation whose result has less than a quarter of the bytes of
    its positional arguments for a reduction, and saves the result. From FP32 to FP8 it is a quarter of x alone.
    """
    return emit(graph, cast_op, x, like=like, quant_scale=quant_scale, dtype=dtype, block=list(block))
