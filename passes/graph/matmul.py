"""A matmul of a graph as an object: the module that it belongs to, which of the three gemms it is, its operands."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from .emit import value
from .groups import GroupedProduct
from .roles import Origin, Role
from .row import Gemm


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a matmul as the graph has it."""

    node: fx.Node
    role: Role
    origin: Origin
    root: fx.Node  # the node that its views and casts start from
    gathered: bool = False  # slices of a parameter, chosen by data


@dataclasses.dataclass(frozen=True)
class Matmul:
    """``result = alpha * left @ right + beta * added``, [B?, M, K] @ [B?, K, N]."""

    node: fx.Node
    op: str
    module: str
    gemm: Gemm
    left: Operand
    right: Operand
    added: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 1.0
    weights: tuple[str, ...] = ()  # dotted names of the parameters that the weight is made of, tied names too
    forward: Matmul | None = None  # of a backward matmul: the forward matmul whose gradient it computes
    makes_weight: bool = False  # it reads parameters alone, or it is part of the gradient of a matmul that does
    # A backward matmul has these three from its forward one.
    number: int = 0  # how many matmuls its module did before it
    line: str = ""  # the line of code that wrote it, with its callers
    ordinal: int = 0  # how many matmuls with its parameter came before it on that line

    @property
    def parameter(self) -> str:
        """The parameter that the weight is made of, by its name in the matmul's module if it has one there."""
        own = (name for name in self.weights if name.rpartition(".")[0] == self.module)
        return next(own, self.weights[0] if self.weights else "")

    @property
    def batched(self) -> bool:
        return value(self.left.node).dim() == 3

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """([B,] M, N, K)."""
        left, right = value(self.left.node), value(self.right.node)
        return (*left.shape[:-1], right.shape[-1], left.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        return value(self.left.node).dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmul(Matmul):
    """A product of ragged groups; ``product`` says how the operands are to be read."""

    product: GroupedProduct

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """(groups, M, N, K)."""
        return self.product.shape


@dataclasses.dataclass(frozen=True)
class OtherMatmul:
    """An op that multiplies matrices in a form that is left alone: all that it gets is a row with the reason."""

    node: fx.Node
    op: str
    module: str
    gemm: Gemm
    reason: str
    shape: tuple[int | torch.SymInt, ...]
