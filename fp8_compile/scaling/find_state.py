"""Which scaling state belongs to a model, to a compiled function, and to what Dynamo is compiling."""

from __future__ import annotations

import dataclasses
import weakref
from types import CodeType
from typing import Any, Callable

from torch import fx, nn

from fp8_compile.torch_internals.dynamo import compiled_modules, frame_code, innermost_fn
from fp8_compile.torch_internals.modules import unwrap

from .model_state import model_state
from .state import ScalingState


def scaling_state(model: nn.Module | Callable[..., Any]) -> ScalingState:
    """The state of a model, plain or compiled; of a compiled function, that of the module or modules it runs."""
    model = unwrap(model)
    if isinstance(model, nn.Module):
        return _state_of_module(model)
    if not callable(model):
        raise TypeError(f"scaling_state expects a module or a compiled function, got {type(model).__name__}")
    function = innermost_fn(model)
    known = [state for module in _modules_within_reach(function) if (state := model_state(module).scaling) is not None]
    if len(known) == 1:
        return known[0]
    of_code = _of_code(function.__code__)
    newest = of_code.newest() if of_code.newest is not None else None
    return newest or of_code.own(function.__code__)


def states_within(model: nn.Module) -> dict[str, ScalingState]:
    """The states of a model and of modules in it that were compiled by themselves, by their dotted names."""
    states = {name: model_state(module).scaling for name, module in model.named_modules()}
    return {name: state for name, state in states.items() if state is not None}


def state_of_compilation(gm: fx.GraphModule) -> ScalingState:
    """The state of what Dynamo is compiling: of the compiled module, or of those that a compiled function runs."""
    return state_of_modules(compiled_modules(gm), frame_code())


def state_of_modules(modules: list[nn.Module], code: CodeType | None) -> ScalingState:
    """The state of the modules that a compiled code runs for."""
    if not modules:
        return _of_code(code).own(code) if code is not None else ScalingState()
    state = _state_of_module(modules[0]) if len(modules) == 1 else _state_of_several(modules)
    if code is not None:
        _of_code(code).newest = weakref.ref(state)
    return state


def _state_of_module(module: nn.Module) -> ScalingState:
    state = model_state(module)
    if state.scaling is None:
        state.scaling = ScalingState(module, state.requests)
    return state.scaling


@dataclasses.dataclass(eq=False)
class _CodeState:
    """What is known of the code of a function."""

    scaling: ScalingState | None = None  # of a function that runs no module
    newest: weakref.ref[ScalingState] | None = None  # of the modules that the code was last compiled for

    def own(self, code: CodeType) -> ScalingState:
        self.scaling = self.scaling or ScalingState(code=code)
        return self.scaling


_by_code: weakref.WeakKeyDictionary[CodeType, _CodeState] = weakref.WeakKeyDictionary()
_by_group: dict[tuple[weakref.ref[nn.Module], ...], ScalingState] = {}  # of functions that run several modules


def _of_code(code: CodeType) -> _CodeState:
    return _by_code.setdefault(code, _CodeState())


def _state_of_several(modules: list[nn.Module]) -> ScalingState:
    key = tuple(weakref.ref(module) for module in modules)
    if key not in _by_group:
        _by_group[key] = ScalingState(several=modules)
        for module in modules:
            weakref.finalize(module, _by_group.pop, key, None)
    return _by_group[key]


def _modules_within_reach(function: Any) -> list[nn.Module]:
    """The modules that a function has in its closure, or that the object has whose method it is."""
    owner = getattr(function, "__self__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_full(cell)]
    attributes = [owner, *vars(owner).values()] if hasattr(owner, "__dict__") else []
    candidates = [unwrap(item) for item in (*cells, *attributes)]
    return [item for item in candidates if isinstance(item, nn.Module)]


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
