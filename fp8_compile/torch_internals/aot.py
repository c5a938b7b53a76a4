"""What AOTAutograd says of the inputs and outputs of a joint graph."""

from __future__ import annotations

from typing import Any, Mapping

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    ForwardTokenAOTInput,
    GradAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import make_boxed_func

__all__ = ["make_boxed_func"]

_NAME = "fp8_compile_input"  # in the meta of a node


def is_tangent(placeholder: fx.Node) -> bool:
    """True for a gradient that comes in from outside."""
    return isinstance(placeholder.meta.get("desc"), TangentAOTInput)


def is_token(placeholder: fx.Node) -> bool:
    """True for what puts operations that raise errors in order, such as the checks of ``torch.linalg``."""
    return isinstance(placeholder.meta.get("desc"), (ForwardTokenAOTInput, BackwardTokenAOTInput))


def name_inputs(graph: fx.Graph, names: Mapping[int, str]) -> None:
    """Call placeholders by names: those that stand for these arguments of Dynamo's graph."""
    for node in graph.find_nodes(op="placeholder"):
        number = input_number(node)
        if number is not None and number in names:
            name_input(node, names[number])


def name_input(placeholder: fx.Node, name: str) -> None:
    placeholder.meta[_NAME] = name


def named_inputs(graph: fx.Graph) -> dict[str, fx.Node]:
    """The placeholders that :func:`name_inputs` has named, by their names."""
    return {node.meta[_NAME]: node for node in graph.find_nodes(op="placeholder") if _NAME in node.meta}


def gradients(graph: fx.Graph) -> list[tuple[int, Any]]:
    """What a joint graph returns as gradients: the position, and the description of the input that it belongs to, which
    that input has as ``meta["desc"]``."""
    descriptions = graph.output_node().meta["desc"]
    return [(index, desc.grad_of) for index, desc in enumerate(descriptions) if isinstance(desc, GradAOTOutput)]


def saved_positions(output: fx.Node) -> list[int]:
    """Which results of a forward graph are saved for backward."""
    descriptions = output.meta.get("desc") or ()
    return [index for index, desc in enumerate(descriptions) if isinstance(desc, SavedForBackwardsAOTOutput)]


def attribute_of(placeholder: fx.Node) -> tuple[str, bool] | None:
    """The name of the parameter or buffer of the graph that a placeholder stands for, and whether it is a parameter."""
    desc = _innermost(placeholder.meta.get("desc"))
    target = getattr(desc, "target", None)
    return None if target is None else (target, bool(desc.is_param()))


def input_number(placeholder: fx.Node) -> int | None:
    """Which argument of Dynamo's graph a placeholder stands for."""
    desc = _innermost(placeholder.meta.get("desc"))
    return desc.idx if type(desc) is PlainAOTInput else None


def _innermost(desc: Any) -> Any:
    """What views and subclasses of an input are made of."""
    while (inner := getattr(desc, "base", None) or getattr(desc, "base_of", None)) is not None:
        desc = inner
    return desc
