"""What can be packed: the weight of a linear layer, or the stack of a mixture, with one matrix per expert.

Both are a parameter that is one matrix or several, which a packed module takes the place of.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Iterator, NamedTuple, Sequence

from torch import Tensor, nn

from .expert_stacks import ExpertStack
from .formats import Settings
from .linear_layers import parameter_of, weight_of
from .packed_experts import PackedStack, replace_stack
from .packed_linear import PackedLinear
from .packed_weight import PackedWeight


class NamedMatrix(NamedTuple):
    """One matrix of a weight."""

    label: str  # its name in errors
    key: str  # its name in a calibration
    values: Tensor  # [N, K]


class Packable(abc.ABC):
    """A weight that can be packed."""

    @property
    @abc.abstractmethod
    def parameter(self) -> nn.Parameter: ...

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(N, K), of a stack (E, N, K)."""

    @abc.abstractmethod
    def matrices(self, name: str) -> Iterator[NamedMatrix]:
        """The matrices of the weight, whose name in the model is ``name``."""

    @abc.abstractmethod
    def replace(self, quantized: Sequence[Any], settings: Settings, input_scale: Tensor | None) -> PackedWeight:
        """Put a packed module, made of the quantized matrices, in the place of the parameter."""

    @abc.abstractmethod
    def share(self, twin: PackedWeight, settings: Settings, input_scale: Tensor | None) -> PackedWeight:
        """Put what a tied weight has become in the place of the parameter."""

    @abc.abstractmethod
    def inputs(self, packed: PackedWeight, settings: Settings) -> str:
        """What the report says about the rounding of inputs."""


@dataclasses.dataclass(frozen=True)
class LayerWeight(Packable):
    """The weight of a linear layer."""

    layer: nn.Module

    @property
    def parameter(self) -> nn.Parameter:
        return parameter_of(self.layer, "weight")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(weight_of(self.layer).shape)

    def matrices(self, name: str) -> Iterator[NamedMatrix]:
        yield NamedMatrix(name, name, weight_of(self.layer).detach())

    def replace(self, quantized: Sequence[Any], settings: Settings, input_scale: Tensor | None) -> PackedWeight:
        (weight,) = quantized
        settings.format.linear.convert(self.layer, weight, self.parameter.dtype, settings.activations, input_scale)
        assert isinstance(self.layer, PackedLinear)
        return self.layer

    def share(self, twin: PackedWeight, settings: Settings, input_scale: Tensor | None) -> PackedWeight:
        assert isinstance(twin, PackedLinear)
        layer = twin.lend(self.layer)
        layer.use_activations(settings.activations, input_scale)  # its inputs are its own
        return layer

    def inputs(self, packed: PackedWeight, settings: Settings) -> str:
        assert isinstance(packed, PackedLinear)
        return packed.inputs


@dataclasses.dataclass(frozen=True)
class StackWeight(Packable):
    """The weights of a mixture's experts.

    gate_up_proj holds gate and up of an expert in one matrix: they have one global scale, as servers want it. Inputs of
    experts stay exact, whatever ``activations`` are: what multiplies them is the module's own forward.
    """

    stack: ExpertStack

    @property
    def parameter(self) -> nn.Parameter:
        return self.stack.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stack.matrices.shape)

    def matrices(self, name: str) -> Iterator[NamedMatrix]:
        for expert, matrix in enumerate(self.stack.matrices):
            yield NamedMatrix(f"{name}[{expert}]", f"{name}.{expert}", matrix.contiguous())

    def replace(self, quantized: Sequence[Any], settings: Settings, input_scale: Tensor | None) -> PackedWeight:
        packed = settings.format.stack.of(quantized, self.parameter.dtype, self.stack.transposed)
        return self.share(packed, settings, input_scale)

    def share(self, twin: PackedWeight, settings: Settings, input_scale: Tensor | None) -> PackedWeight:
        assert isinstance(twin, PackedStack)
        replace_stack(self.stack.module, self.stack.name, twin)
        return twin

    def inputs(self, packed: PackedWeight, settings: Settings) -> str:
        return "" if settings.activations is None else "inputs exact"
