"""The loss scale as graphs see it: two small tensors on each device, and which of them a compilation is given."""

from __future__ import annotations

import weakref
from typing import Any, Callable

import torch
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import input_codes
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .config import Config
from .loss_scaler import INIT_SCALE
from .module_names import compiled_root, frame_code, modules_read
from .passes.scale_loss import FACTORS, OVERFLOW


class GraphLossScale:
    """``factors`` (scale, 1 / scale) are read by the graphs; ``overflow`` is raised by them. See ``ScaleLoss``."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self.wide = False  # gradients of 16-bit parameters leave in FP32
        self._tensors: dict[torch.device, dict[str, Tensor]] = {}

    def buffers(self, device: torch.device) -> dict[str, Tensor]:
        """Name in the graph -> tensor."""
        if device not in self._tensors:
            with unset_fake_temporarily(), torch.device(device):
                factors = torch.tensor([self.value, 1.0 / self.value], dtype=torch.float32)
                self._tensors[device] = {FACTORS: factors, OVERFLOW: torch.zeros(1, dtype=torch.float32)}
        return self._tensors[device]

    def set(self, value: float) -> None:
        """Change the scale of all backward passes that begin from now on."""
        self.value = value
        for tensors in self._tensors.values():
            # .data: a forward may have saved it for its backward, and autograd compares versions.
            tensors[FACTORS].data.copy_(torch.tensor([value, 1.0 / value], dtype=torch.float32))

    def largest(self) -> list[Tensor]:
        """The largest gradients that left a graph since :meth:`clear`, one a device, [1] fp32."""
        return [tensors[OVERFLOW] for tensors in self._tensors.values()]

    def clear(self) -> None:
        for tensor in self.largest():
            tensor.data.zero_()


# By module, for every module of an attached model: gives the scale that a config asks for, or None.
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod] = weakref.WeakKeyDictionary()
_of_attached: weakref.WeakKeyDictionary[nn.Module, GraphLossScale] = weakref.WeakKeyDictionary()
_fixed: weakref.WeakKeyDictionary[nn.Module, GraphLossScale] = weakref.WeakKeyDictionary()  # by options alone
_compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # have code
# Compiled for training without a loss scale: the Python code of the frames.
_unscaled: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()


def offer(model: nn.Module, give: Callable[[Config], GraphLossScale | None]) -> None:
    """Ask ``give``, a method, for the loss scale of graphs of this model that are compiled from now on."""
    for module in model.modules():
        _attached[module] = weakref.WeakMethod(give)


def graph_loss_scale(model: nn.Module) -> GraphLossScale:
    """That of an attached model; the same at every attach, since code that was compiled for the first one reads it."""
    return _of_attached.setdefault(model, GraphLossScale())


def withdraw(model: nn.Module) -> None:
    for module in model.modules():
        _attached.pop(module, None)


def is_offered(model: nn.Module) -> bool:
    """Whether a model is attached, or a module of it, or one that it is in."""
    return any(module in _attached and _attached[module]() is not None for module in model.modules())


def was_compiled(model: nn.Module) -> bool:
    return any(module in _compiled for module in model.modules())


def compiled_without(model: nn.Module) -> bool:
    """Whether some of the model's code for training has no loss scale in it."""
    codes = {code for module in model.modules() for code in _unscaled.get(module, ())}
    return any(code in input_codes for code in codes)  # empty after torch._dynamo.reset()


def loss_scale_of_compilation(gm: fx.GraphModule, config: Config, *, strict: bool) -> GraphLossScale | None:
    """The loss scale for what Dynamo is compiling."""
    root = compiled_root()
    modules = [root] if root is not None else list(modules_read(gm).values())
    methods = [_attached[module]() for module in modules if module in _attached]
    give = next((method for method in methods if method is not None), None)
    scale = give(config) if give is not None else _by_options(modules, config, strict)
    _compiled.update(modules)
    if scale is None and torch.is_grad_enabled():
        for module in modules:
            _unscaled.setdefault(module, set()).add(frame_code())
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
        if module not in _fixed or _fixed[module].value != value:
            _fixed[module] = GraphLossScale(value)
        return _fixed[module]
    return GraphLossScale(value)
