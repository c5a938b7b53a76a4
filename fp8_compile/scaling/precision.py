"""Which gemms of a model run in high precision for now: a switch in the middle of a run.

    fp8_compile.set_precision(model, output="high")      forward gemms in the model's own dtype, gradients as before
    fp8_compile.set_precision(model)                     all gemms as the recipe has them again

Each module knows which of its gemms that are; a guard asks it, so that a switch takes effect at the next call, by code
of its own. Code that was compiled before is kept: switching back and forth compiles each setting once.

Gemms in high precision record no amaxes. A slot that nothing has recorded since the switch is forgotten on the way
back: its tensor takes its scale from itself at first, as in a first step, and not from histories of long ago.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8_compile.kernels.delayed_scaling import RUNS
from fp8_compile.passes.graph.slot import Slot
from fp8_compile.torch_internals.modules import unwrap

from .model_state import model_state, scaling_states
from .requests import Changes

if TYPE_CHECKING:
    from .state import ScalingState

GEMMS = ("output", "grad_input", "grad_weight")
HIGH = "high"
KEY = "precision"  # in a saved scaling state: KEY for the model, "layers.3.precision" for a module that differs

Gemms = frozenset[str]


def set_precision(
    model: nn.Module, output: str | None = None, grad_input: str | None = None, grad_weight: str | None = None
) -> None:
    """Run these gemms of a model, or of a part of one, in high precision (``"high"``), and the others as the recipe has
    them (None). It takes effect at the next call of the model, is saved with its scaling state, and holds until it is
    called again."""
    module = unwrap(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"set_precision expects a module, got {type(module).__name__}")
    given = {"output": output, "grad_input": grad_input, "grad_weight": grad_weight}
    for name, value in given.items():
        if value not in (None, HIGH):
            raise ValueError(f"set_precision: {name} expects 'high' or None, got {value!r}")
    wanted = frozenset(name for name, value in given.items() if value == HIGH)
    switch({inner: wanted for inner in module.modules()})


def switch(wanted: Mapping[nn.Module, Gemms]) -> None:
    """Give modules the gemms that they run in high precision."""
    changes = {module: gemms for module, gemms in wanted.items() if model_state(module).high != gemms}
    if not changes:
        return
    back = any(model_state(module).high - gemms for module, gemms in changes.items())
    for state in list(scaling_states):
        if any(inner in changes for model in state.models for inner in model.modules()):
            _forget_unread(state, back=back)
    for module, gemms in changes.items():
        model_state(module).high = gemms
    Changes.note()


def _forget_unread(state: ScalingState, *, back: bool) -> None:
    """Gemms are about to go to high precision; ``back``: some return from there. What nothing has recorded since they
    went is of long ago, and is forgotten: its next run takes the scale from the tensor itself."""
    runs = runs_by_slot(state)
    if back and state.runs_before is not None:
        for slot, place in state.trained():
            if state.runs_before.get(slot, 0) == runs[slot]:
                state.tables[place.table].forget(place.row)
                state.epoch += 1
        state.runs_before = None
    if state.runs_before is None:
        state.runs_before = runs_by_slot(state)


def runs_by_slot(state: ScalingState) -> dict[Slot, int]:
    """How many runs have recorded each slot. Waits for the device."""
    state.settle()
    counts = [table.counts[RUNS].tolist() for table in state.tables]
    return {slot: counts[place.table][place.row] for slot, place in state.trained()}


def saved_precision(model: nn.Module | None) -> dict[str, Tensor]:
    """What a scaling state says of it: of the model, and of modules that differ from what they are in."""
    found: dict[str, Tensor] = {}
    high: dict[str, Gemms] = {}
    for name, module in model.named_modules() if model is not None else ():
        high[name] = model_state(module).high
        around = high.get(name.rpartition(".")[0], frozenset()) if name else frozenset()
        if high[name] != around:
            flags = [gemm in high[name] for gemm in GEMMS]
            found[f"{name}.{KEY}".lstrip(".")] = torch.tensor(flags, dtype=torch.uint8)
    return found


def is_precision(key: Any) -> bool:
    """True for a key of a saved state that is not a slot's."""
    return isinstance(key, str) and "#" not in key and key.rpartition(".")[2] == KEY


def read_precision(model: nn.Module | None, saved: Mapping[str, Any]) -> dict[nn.Module, Gemms]:
    """What a saved state says of each module of a model; an error where it says it of another model."""
    by_name = {key.removesuffix(KEY).rstrip("."): _read(key, value) for key, value in saved.items()}
    modules = dict(model.named_modules()) if model is not None else {}
    if unknown := sorted(set(by_name) - set(modules)):
        raise ValueError(
            f"the scaling state has a precision of {', '.join(unknown)}, which the model does not have; expected a "
            "state_dict() of a model with the same modules"
        )
    wanted = {}
    for name, module in modules.items():
        wanted[module] = next((by_name[start] for start in _around(name) if start in by_name), frozenset())
    return wanted


def _around(name: str) -> Iterable[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _read(key: str, value: Any) -> Gemms:
    flags = value.tolist() if isinstance(value, Tensor) and value.shape == (len(GEMMS),) and not value.is_meta else None
    if flags is None or not all(flag in (0, 1) for flag in flags):
        raise ValueError(f"the scaling state has {key}={value!r}; expected three numbers, each 0 or 1")
    return frozenset(gemm for gemm, flag in zip(GEMMS, flags) if flag)
