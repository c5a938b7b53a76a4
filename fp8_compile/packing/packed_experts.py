"""Mixtures of experts whose weights are packed: stacks of matrices, NVFP4 or FP8.

An experts module of transformers keeps its class's forward, and with it every implementation of it (eager, grouped_mm,
batched_mm). Its class becomes a subclass whose ``gate_up_proj`` and ``down_proj`` are properties:

    experts.gate_up_proj          the weight as before, [E, N, K] or [E, K, N], dequantized when it is used
    experts.gate_up_proj_packed   a PackedStack, whose buffers state_dict() has

Under a compiler the property is one operation, which ``passes/joint/multiply_packed.py`` knows. Otherwise it is a
tensor that dequantizes the experts that are looked up in it, and all of them only where it is used as a whole.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor, nn

from fp8_compile.kernels import experts as ops
from fp8_compile.kernels.cpu.large_pages import in_large_pages
from fp8_compile.kernels.fp8_inputs import round_inputs_op
from fp8_compile.kernels.nvfp4.ops import STANDARD, to_standard
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.torch_internals.graphs import plain_torch_functions, pytree
from fp8_compile.torch_internals.transformers import experts_implementation

from .packed_weight import Matrix, NVFP4Parts, PackedWeight
from .static_inputs import FP8Parts

aten = torch.ops.aten


class PackedStack(PackedWeight):
    """E matrices [N, K], each packed by itself."""

    experts: int
    out_features: int  # N
    in_features: int  # K
    transposed: bool  # True if the module reads them as [K, N]

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, transposed: bool, parts: dict[str, Tensor]) -> None:
        super().__init__()
        self.experts, self.out_features, self.in_features = shape
        self.dtype, self.transposed = dtype, transposed
        for name, value in parts.items():
            self.register_buffer(name, value)

    @classmethod
    def of(cls, matrices: Sequence[Any], dtype: torch.dtype, transposed: bool) -> PackedStack:
        """The stack of some matrices in the class's format."""
        parts = {name: torch.stack([getattr(one, name) for one in matrices]) for name in cls.packed}
        return cls((len(matrices), *matrices[0].shape), dtype, transposed, parts)

    def matrix(self, expert: int) -> Matrix:
        """One expert's packed weight in the standard layout."""
        made: Matrix = self.matrix_type(*(getattr(self, name)[expert] for name in type(self).packed))
        return made

    @property
    def static_inputs(self) -> bool | None:
        """As of a layer; None: inputs are exact."""
        return None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.out_features, self.in_features

    @property
    def weight(self) -> Tensor:
        """The stack as the module reads it."""
        if torch.compiler.is_compiling():
            return self.as_read(self.dequantize(self.dtype))
        return LazyStack(self) if self.static_inputs is None else RoundingStack(self)

    def dequantize(self, dtype: torch.dtype = torch.float32, which: Tensor | None = None) -> Tensor:
        """[E, N, K], or the matrices that ``which`` names, [*which.shape, N, K]."""
        raise NotImplementedError

    def round_inputs(self, x: Tensor) -> Tensor:
        """x [..., K] as the product sees it, where ``static_inputs`` says that it is rounded."""
        raise NotImplementedError

    def as_read(self, matrices: Tensor) -> Tensor:
        return matrices.transpose(-2, -1) if self.transposed else matrices

    def extra_repr(self) -> str:
        return f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"


class NVFP4Stack(NVFP4Parts, PackedStack):
    """codes uint8 [E, N, K'/2], block_scales e4m3 [E, N, K'/B], global_scale fp32 [E]."""

    @classmethod
    def of(cls, matrices: Sequence[NVFP4Weight], dtype: torch.dtype, transposed: bool) -> NVFP4Stack:
        stack = super().of(matrices, dtype, transposed)
        assert isinstance(stack, NVFP4Stack)
        stack.layout, stack.block_size = STANDARD, matrices[0].block_size
        stack.use_best_layout()
        return stack

    def matrix(self, expert: int) -> NVFP4Weight:
        codes, block_scales = to_standard(self.codes[expert], self.block_scales[expert], self.layout)
        return NVFP4Weight(codes, block_scales, self.global_scale[expert], self.in_features)

    def dequantize(self, dtype: torch.dtype = torch.float32, which: Tensor | None = None) -> Tensor:
        parts = self.codes, self.block_scales, self.global_scale
        return ops.nvfp4_dequantize_op(*parts, self.in_features, dtype, self.layout, which)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layout={self.layout}"


class FP8Stack(FP8Parts, PackedStack):
    """codes e4m3 [E, N, K], scales fp32 [E, N]; inputs of all experts have the same scale, where it is static."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, transposed: bool, parts: dict[str, Tensor]) -> None:
        super().__init__(shape, dtype, transposed, {**parts, "codes": in_large_pages(parts["codes"])})
        self.use_activations(None)

    def dequantize(self, dtype: torch.dtype = torch.float32, which: Tensor | None = None) -> Tensor:
        if self.activations is not None and torch.compiler.is_compiling():  # passes round what is multiplied by it
            return ops.fp8_dequantize_rounding_op(self.codes, self.scales, self.input_scale, dtype, which)
        return ops.fp8_dequantize_op(self.codes, self.scales, dtype, which)

    def round_inputs(self, x: Tensor) -> Tensor:
        return round_inputs_op(x.reshape(-1, x.shape[-1]), self.input_scale).view(x.shape)


class LazyStack(Tensor):
    """A packed stack that looks like the dequantized one. Only the experts that are looked up are dequantized."""

    stack: PackedStack

    @staticmethod
    def __new__(cls, stack: PackedStack) -> LazyStack:
        n, k = stack.out_features, stack.in_features
        shape = (stack.experts, k, n) if stack.transposed else (stack.experts, n, k)
        device = getattr(stack, stack.packed[0]).device
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=stack.dtype, device=device)
        made.stack = stack
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self._dequantized())

    def _dequantized(self, which: Tensor | None = None) -> Tensor:
        return self.stack.as_read(self.stack.dequantize(self.dtype, which))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is aten.select.int and args[1] == 0:
            return args[0]._dequantized(torch.tensor(args[2]))
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype in (torch.int32, torch.int64):
            return args[0]._dequantized(args[1][0])
        args, kwargs = pytree.tree_map_only(LazyStack, LazyStack._dequantized, (args, kwargs or {}))
        return func(*args, **kwargs)


PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback")


class RoundsInputs(Tensor):
    """Matrices of a stack that round what they are multiplied by; so do views of them and lookups in them."""

    stack: PackedStack

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, RoundsInputs))
        product = getattr(func, "__name__", "") in PRODUCTS
        if product:
            x, weight, *rest = args
            if isinstance(x, RoundsInputs):  # a right operand has K along its rows
                args = x, ours.stack.round_inputs(weight.transpose(-2, -1)).transpose(-2, -1), *rest
            else:
                args = ours.stack.round_inputs(x), weight, *rest
        with plain_torch_functions():
            result = func(*args, **(kwargs or {}))
        if product or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        found = result.as_subclass(RoundedMatrices)
        found.stack = ours.stack
        return found


class RoundedMatrices(RoundsInputs):
    """Some matrices, dequantized."""


class RoundingStack(RoundsInputs, LazyStack):
    """The whole stack, of which those that are looked up are dequantized."""


class PackedExperts(nn.Module):
    """An experts module with packed stacks; ``replace_stack`` makes the class of each from the module's own."""

    own_class: type[nn.Module]  # what it was before
    config: Any  # transformers' configuration of the model
    stacks: tuple[str, ...]  # the names of its packed weights

    def stack(self, name: str) -> PackedStack:
        return getattr(self, f"{name}_packed")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward. Its eager implementation loops over data, which no graph can hold. It runs
        uncompiled, where it dequantizes the experts that it uses; in the pieces of a broken graph it would dequantize
        all of them each time."""
        if torch.compiler.is_compiling() and experts_implementation(self.config) == "eager":
            return _uncompiled(self, args, kwargs)
        return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.own_class, self.stacks), self.__dict__


@torch.compiler.disable
def _uncompiled(module: PackedExperts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module.own_class.forward(module, *args, **kwargs)


def replace_stack(module: nn.Module, name: str, stack: PackedStack) -> None:
    """Put a packed stack in the place of a parameter: hooks, names of modules and references stay."""
    own, stacks = (module.own_class, module.stacks) if isinstance(module, PackedExperts) else (type(module), ())
    module._parameters.pop(name, None)
    module.__class__ = _packed_class(own, tuple(dict.fromkeys((*stacks, name))))
    module.add_module(f"{name}_packed", stack.train(module.training))


def _packed_class(own: type[nn.Module], stacks: tuple[str, ...]) -> type[nn.Module]:
    if (own, stacks) not in _classes:
        fields: dict[str, Any] = {name: _property(name) for name in stacks}
        fields |= {"own_class": own, "stacks": stacks, "__module__": __name__}
        _classes[own, stacks] = type(f"Packed{own.__name__}", (PackedExperts, own), fields)
    return _classes[own, stacks]


_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _property(name: str) -> property:
    packed = f"{name}_packed"
    return property(lambda module: getattr(module, packed).weight)


def _empty(own: type[nn.Module], stacks: tuple[str, ...]) -> nn.Module:
    """Make an instance for a copy or a pickle: a class that is made on demand has no name to be found by."""
    made = _packed_class(own, stacks)
    return made.__new__(made)
