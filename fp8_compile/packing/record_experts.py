"""Record what goes into each expert of a mixture. No module is called for an expert, but the eager implementation
multiplies by ``gate_up_proj[expert]``: what it looks up there tells which expert the product belongs to.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Mapping

from torch import Tensor, nn

from fp8_compile.torch_internals.graphs import plain_torch_functions
from fp8_compile.torch_internals.transformers import experts_implementation, set_experts_implementation

from .expert_stacks import ExpertStack
from .linear_layers import parameter_of

PRODUCTS = ("linear", "matmul", "__matmul__", "mm")


@contextlib.contextmanager
def recording_experts(
    stacks: Mapping[str, ExpertStack], record: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """For the length of a block, call ``record(f"{stack}.{expert}", x)`` with the inputs x of every expert."""
    modules: dict[int, tuple[nn.Module, dict[str, str]]] = {}
    for name, stack in stacks.items():
        modules.setdefault(id(stack.module), (stack.module, {}))[1][stack.name] = name
    configs: dict[int, Any] = {id(module.config): module.config for module, _ in modules.values()}
    implementations = [(config, experts_implementation(config)) for config in configs.values()]
    classes = [(module, type(module)) for module, _ in modules.values()]
    try:
        for config, _ in implementations:
            set_experts_implementation(config, "eager")
        for module, names in modules.values():
            fields = {own: _watched(own, name, record) for own, name in names.items()}
            module.__class__ = type(type(module).__name__, (type(module),), fields)
        yield
    finally:
        for module, kind in classes:
            module.__class__ = kind
        for config, implementation in implementations:
            set_experts_implementation(config, implementation)


def _watched(own: str, name: str, record: Callable[[str, Tensor], None]) -> property:
    def get(module: nn.Module) -> Watched:
        seen = parameter_of(module, own).detach().as_subclass(Watched)
        seen.record, seen.label = record, name
        return seen

    return property(get)


class Watched(Tensor):
    """A stack that records what its matrices are multiplied by; also one of its matrices, once it was looked up."""

    record: Callable[[str, Tensor], None]
    label: str  # its name; an expert's is followed by its number
    matrix: bool = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_torch_functions():
            result = func(*args, **(kwargs or {}))
        called = getattr(func, "__name__", "")
        if called == "__getitem__" and not args[0].matrix and result.dim() == 2:
            matrix = result.as_subclass(Watched)
            matrix.record, matrix.label, matrix.matrix = args[0].record, f"{args[0].label}.{int(args[1])}", True
            return matrix
        if called in PRODUCTS and isinstance(args[1], Watched) and args[1].matrix:
            args[1].record(args[1].label, args[0])
        return result
