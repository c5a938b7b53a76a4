"""Names of the placeholders that the backend adds to a graph, beside those of the scaling state (``slot.py``)."""

from __future__ import annotations

from torch import fx

from fp8_compile.torch_internals.aot import named_inputs

# Of loss scaling: [2] and [1], fp32.
FACTORS, OVERFLOW = "fp8_loss_factors", "fp8_loss_overflow"
SCALE, INVERSE = 0, 1  # in FACTORS

# Of the weight cache.
WEIGHT_PREFIX = "fp8_weight_"
CODES, TRANSPOSED, KNOWN = "codes", "transposed", "known"


def weight_buffer(index: int, field: str) -> str:
    """The name of an FP8 copy of the weight that is argument ``index``; with ``KNOWN``, of the scales of a page of
    copies."""
    return f"{WEIGHT_PREFIX}{index}_{field}"


def weight_buffers(graph: fx.Graph) -> dict[str, fx.Node]:
    """The placeholders of a graph that hold copies of weights and their scales, by name."""
    return {name: node for name, node in named_inputs(graph).items() if name.startswith(WEIGHT_PREFIX)}
