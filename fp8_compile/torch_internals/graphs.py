"""Fake tensors, names of operations, and how a function is traced for a graph."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Callable, Iterable, Mapping

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree

__all__ = ["FakeTensorMode", "OpOverload", "pytree"]

# What a model raises on fake tensors where its Python code looks at values.
LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
# Operations that run a whole layer of torch.nn in inference.
ENCODER_LAYER, MULTI_HEAD_ATTENTION = torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention


def is_fake(item: Any) -> bool:
    return isinstance(item, FakeTensor)


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Tensors that are made meanwhile are real, also while a graph is compiled, which runs on fake ones."""
    return unset_fake_temporarily()


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The mode under which the first fake tensor among these was made; without one, that of the graph being traced."""
    mode = next((item.fake_mode for item in values if isinstance(item, FakeTensor)), None) or detect_fake_mode([])
    assert mode is not None, "tensors that are not fake"
    return mode


def fake_like(tensors: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Tensors that are made meanwhile are fake if these are, or those that are being compiled with."""
    return detect_fake_mode(list(tensors)) or contextlib.nullcontext()


def plain_torch_functions() -> contextlib.AbstractContextManager[None]:
    """Operations meanwhile see tensors of subclasses as plain ones: no ``__torch_function__`` is called."""
    return torch._C.DisableTorchFunctionSubclass()


def quiet_fake_tensors() -> None:
    """Keep torch from logging what a model did that fake tensors can't."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def schema_name(node: fx.Node) -> str:
    """``aten::mm``; "" for what is not an operation of the dispatcher."""
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""


def op_name(node: fx.Node) -> str:
    """``mm``; "" for what is not an operation of the dispatcher."""
    return schema_name(node).partition("::")[2]


def argument_names(node: fx.Node) -> list[str]:
    """Names of the arguments of a node's operation."""
    assert isinstance(node.target, OpOverload), node
    return [argument.name for argument in node.target._schema.arguments]


def schema_of(op: OpOverload) -> Any:
    return op._schema


def remove_dead_nodes(graph: fx.Graph) -> None:
    """``graph.eliminate_dead_code()``, in a tenth of its time: that checks the whole graph first, and asks of every
    node whether it has side effects, also of those that are used."""
    from torch._guards import TracingContext
    from torch._inductor import config

    random_is_impure = config.fallback_random if TracingContext.try_get() else True
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure(random_is_impure):
            graph.erase_node(node)
    if graph.owning_module is not None:
        subgraphs = {node.target for node in graph.find_nodes(op="get_attr")}
        for name, child in graph.owning_module.named_children():
            if name in subgraphs and isinstance(child, fx.GraphModule):
                child.graph.eliminate_dead_code()
                child.recompile()


def python_dispatcher() -> contextlib.AbstractContextManager[None]:
    """Decompositions and meta functions that are written in Python take part, as while a graph is traced."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def trace(function: Callable[..., Any], *tensors: torch.Tensor) -> fx.Graph:
    """The operations of a function, decomposed as Inductor wants them in a joint graph."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decomposition_table=select_decomp_table())(*tensors).graph


def triton_launch(
    kernel: Any, grid: tuple[Any, ...], arguments: Mapping[str, Any], constants: Mapping[str, Any]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The operation that launches a Triton kernel which writes to some of its arguments, and what it is called with."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    # Or a launch, which has no result to be used, would be taken for dead code.
    fx.node.has_side_effect(triton_kernel_wrapper_mutation)
    return triton_kernel_wrapper_mutation, {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args(dict(constants)),
        "grid": [grid],
        "tma_descriptor_metadata": {},
        "kwargs": dict(arguments),
    }
