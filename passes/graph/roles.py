"""What the tensors of a matmul are: where a value comes from, and which role it plays."""

from __future__ import annotations

import enum
from typing import Protocol

from torch import fx


class Origin(enum.IntFlag):
    """What a value is computed from."""

    CONSTANT = 0
    PARAMETER = 1  # or whatever else is known to be a weight
    BUFFER = 2
    INPUT = 4
    GRADIENT = 8

    @property
    def is_weight(self) -> bool:
        """True for what is computed from parameters, perhaps with buffers (a mask, a norm), and from nothing that
        flows."""
        return bool(self & Origin.PARAMETER) and not self.flows

    @property
    def flows(self) -> bool:
        """True for what has another value in each call, whatever the weights are."""
        return bool(self & (Origin.INPUT | Origin.GRADIENT))


class Role(enum.StrEnum):
    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Names(Protocol):
    """What passes ask about names; ``fp8_compile.backend.module_names`` knows them."""

    def module_of(self, node: fx.Node) -> str: ...

    def parameters_of(self, placeholder: fx.Node) -> tuple[str, ...]: ...

    def weights_of(self, placeholder: fx.Node) -> tuple[str, ...]: ...

    def is_buffer(self, placeholder: fx.Node) -> bool: ...


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
