"""The loss scale as graphs see it: two small tensors on each device, and which of them a compilation is given."""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Iterable, Protocol

import torch
from torch import Tensor, nn

from fp8_compile.config import Config
from fp8_compile.passes.graph.loss_scale import FACTORS, OVERFLOW
from fp8_compile.torch_internals.dynamo import still_compiled
from fp8_compile.torch_internals.graphs import real_tensors
from fp8_compile.torch_internals.modules import is_compiled

from .model_state import model_state
from .requests import Changes

INIT_SCALE = 2.0**16  # that a dynamic loss scale begins with


class GraphLossScale:
    """``factors`` (scale, 1 / scale) are read by the graphs; ``overflow`` is raised by them. See ``ScaleLoss``."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self.wide = False  # gradients of 16-bit parameters leave in FP32
        self._tensors: dict[torch.device, dict[str, Tensor]] = {}

    @staticmethod
    def examples(device: torch.device) -> dict[str, Tensor]:
        """Name in the graph -> a tensor like the one that the code will be given."""
        sizes = {FACTORS: 2, OVERFLOW: 1}
        return {name: torch.empty(size, dtype=torch.float32, device=device) for name, size in sizes.items()}

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Name in the graph -> tensor."""
        if device not in self._tensors:
            with real_tensors(), torch.device(device):
                factors = torch.tensor([self.value, 1.0 / self.value], dtype=torch.float32)
                self._tensors[device] = {FACTORS: factors, OVERFLOW: torch.zeros(1, dtype=torch.float32)}
        return self._tensors[device]

    def set(self, value: float) -> None:
        """Change the scale of every backward that begins from now on."""
        self.value = value
        for tensors in self._tensors.values():
            # .data: a forward may have saved it for its backward, and autograd compares versions.
            tensors[FACTORS].data.copy_(torch.tensor([value, 1.0 / value], dtype=torch.float32))

    def largest(self) -> list[Tensor]:
        """The largest gradients that left a graph since :meth:`clear`, one per device, [1] fp32."""
        return [tensors[OVERFLOW] for tensors in self._tensors.values()]

    def clear(self) -> None:
        for tensor in self.largest():
            tensor.data.zero_()


class Scaled(Protocol):
    """The loss scaling of an attached model, as a compilation asks for it. Several may have a module in common."""

    model: nn.Module
    setting: float | str | None  # None: off
    value: float
    wide: bool

    def follow_options(self, config: Config) -> None:
        """Graphs are compiled with these options, which may ask for a loss scale."""
        ...


def offer(scaled: Scaled) -> None:
    """Ask it for the loss scale of graphs of its model that are compiled from now on."""
    Changes.note()
    weakref.finalize(scaled, Changes.note)
    for module in scaled.model.modules():
        model_state(module).loss_scalings.add(scaled)


def withdraw(scaled: Scaled) -> None:
    Changes.note()
    for module in scaled.model.modules():
        model_state(module).loss_scalings.discard(scaled)


def offered(modules: Iterable[nn.Module]) -> list[Scaled]:
    """Those that have one of the modules."""
    return list({id(one): one for module in modules for one in model_state(module).loss_scalings}.values())


def sharing_graphs(model: nn.Module) -> list[Scaled]:
    """Those whose models have compiled code in common with this one: the model itself, one in the other, or a module of
    both that was compiled by itself. A module in two models that are compiled as wholes has code in each."""
    found = [
        one
        for module in set(model.modules())
        for one in model_state(module).loss_scalings
        if module is model or module is one.model or is_compiled(module) or model_state(module).has_code
    ]
    return list({id(one): one for one in found}.values())


def scales_of(modules: Iterable[nn.Module]) -> list[GraphLossScale]:
    """Those that graphs of the modules read."""
    found = [scale for module in modules for scale in model_state(module).graph_loss_scales]
    return list({id(scale): scale for scale in found}.values())


def was_compiled(model: nn.Module) -> bool:
    return any(model_state(module).has_code for module in model.modules())


def compiled_without(model: nn.Module) -> bool:
    """True if some of the model's code for training has no loss scale in it."""
    codes = {code for module in model.modules() for code in model_state(module).unscaled_frames}
    return any(map(still_compiled, codes))


def loss_scale_of(
    modules: list[nn.Module], code: CodeType | None, config: Config, *, strict: bool = True
) -> GraphLossScale | None:
    """The loss scale for what Dynamo compiles, or runs, for these modules."""
    attached = offered(modules)
    scale = _by_attached(modules, config, attached) if attached else _by_options(modules, config, strict)
    for state in map(model_state, modules):
        state.has_code = True
        if scale is None and torch.is_grad_enabled() and code is not None:
            state.unscaled_frames.add(code)
    return scale


def loss_scale_in_use(modules: list[nn.Module], code: CodeType | None, config: Config) -> GraphLossScale:
    """The loss scale for code that has one: that of the training loop; where it has ended, the one that it left, or one
    that changes nothing."""
    if not offered(modules) and (left := _known(modules)) is not None:
        return left
    return loss_scale_of(modules, code, config) or GraphLossScale()


def _known(modules: list[nn.Module]) -> GraphLossScale | None:
    """The loss scale that graphs of all these modules have read."""
    each = [model_state(module).graph_loss_scales for module in modules]
    return next((one for one in each[0] if all(one in others for others in each)), None) if each else None


def refuse_contradiction(attached: list[Scaled]) -> None:
    """One graph has one loss scale, and a dynamic one follows the steps of one optimizer."""
    settings = [one.setting for one in attached]
    if len(attached) < 2 or (len(set(settings)) == 1 and settings[0] != "dynamic"):
        return
    each = " and ".join(f"{type(one.model).__name__} with loss_scale={one.setting!r}" for one in attached)
    raise ValueError(
        f"{each} are attached to optimizers of their own and run the same compiled code, which has one loss scale; "
        "expected the same fixed number or None for all of them. With loss_scale='dynamic', compile each model as a "
        "whole instead of the module that they share, or attach one optimizer that has the parameters of all"
    )


def _by_attached(modules: list[nn.Module], config: Config, attached: list[Scaled]) -> GraphLossScale | None:
    for one in attached:
        one.follow_options(config)
    refuse_contradiction(attached)
    if attached[0].setting is None:
        return None
    scale = _known(modules)
    if scale is None:
        scale = GraphLossScale(attached[0].value)
        for module in modules:
            model_state(module).graph_loss_scales.append(scale)
    scale.wide = any(one.wide for one in attached)
    return scale


def _by_options(modules: list[nn.Module], config: Config, strict: bool) -> GraphLossScale | None:
    if config.loss_scale is None:
        return None
    if config.loss_scale == "dynamic":
        if strict:
            raise ValueError(
                "loss_scale='dynamic' has nobody to update it: call fp8_compile.attach(model, optimizer) before the "
                "first forward, or give a fixed loss_scale such as 65536"
            )
        return GraphLossScale(INIT_SCALE)
    value = float(config.loss_scale)
    for module in modules[:1]:
        state = model_state(module)
        if state.fixed_loss_scale is None or state.fixed_loss_scale.value != value:
            state.fixed_loss_scale = GraphLossScale(value)
        return state.fixed_loss_scale
    return GraphLossScale(value)
