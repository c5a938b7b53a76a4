"""Inference with fixed scales: those that training has found, or those of a calibration.

    reach       = F / quant_scale of the last training step            or the calibration's amax * 2**margin
    quant_scale = F / reach                                            for every input of that layer, from now on

Without it an inference graph takes each input's scale from the input itself, which reads the input twice. With it an
input beyond ``reach`` is saturated; ``scaling_state(model)`` counts how often that happened. Training has found scales
of weights, too: with them inference multiplies by the codes that training multiplies by (``frozen_weights.py``).
"""

from __future__ import annotations

from typing import Any, Callable

from torch import nn

from fp8_compile.kernels.formats import E4M3
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.update_rule import UpdateRule
from fp8_compile.torch_internals.modules import is_compiled, unwrap

from .find_state import scaling_state, states_within
from .state import KnowsAmaxes, ScalingState


def freeze_scales(model: nn.Module | Callable[..., Any], calibration: KnowsAmaxes | None = None) -> None:
    """Fix scales for inference: those of inputs and weights as training has found them, or those of inputs by a
    calibration of the same model.

    Inputs that neither knows take their own scale as before, with a line in the log that names them. Training is not
    affected. ``scaling_state(model).unfreeze()`` undoes it.
    """
    states = _states(model)
    reaches = {
        name: _of_calibration(name, state, calibration) if calibration is not None else _of_training(state)
        for name, state in states.items()
    }
    if not any(reaches.values()):
        got = "a calibration that knows none of its layers" if calibration is not None else "no training step so far"
        raise ValueError(
            f"there are no scales to freeze for {type(unwrap(model)).__name__}: got {got}; expected a training "
            "step with torch.compile(model, backend='fp8') under recipe='delayed', a loaded scaling state, or "
            "freeze_scales(model, fp8_compile.calibrate(model, batches))"
        )
    for name, state in states.items():
        state.freeze(reaches[name])


def _states(model: nn.Module | Callable[..., Any]) -> dict[str, ScalingState]:
    """By the name of the module: the model's, and those of modules in it that are compiled by themselves."""
    module = unwrap(model)
    if not isinstance(module, nn.Module):
        return {"": scaling_state(model)}
    inner = {name: scaling_state(inner) for name, inner in module.named_modules() if is_compiled(inner)}
    return {"": scaling_state(module), **inner, **states_within(module)}


def _of_training(state: ScalingState) -> dict[str, float]:
    saved = state.state_dict()
    roles = [f".{role}" for role in (Role.INPUT, Role.WEIGHT)]
    keys = [key for key in saved if key.endswith(".scale") and any(role in key.rpartition("#")[2] for role in roles)]
    scales = {key.removesuffix(".scale"): float(saved[key]) for key in keys if float(saved[key]) > 0}
    copied = {str(slot): float(scale) for slot, scale in state.weights.scales().items()} if state.weights else {}
    scales |= {slot: scale for slot, scale in copied.items() if slot in scales}
    return {slot: float(saved[f"{slot}.largest"]) / scale for slot, scale in scales.items()}


def _of_calibration(prefix: str, state: ScalingState, calibration: KnowsAmaxes) -> dict[str, float]:
    room = 2.0 ** UpdateRule().margin_of(Role.INPUT, E4M3.max)
    found = {}
    for name, _ in state.model.named_modules() if state.model is not None else ():
        try:
            amax = float(calibration.amax(".".join(part for part in (prefix, name) if part)))
        except (KeyError, ValueError):  # not a layer, or one that no batch has reached
            continue
        if amax > 0:
            found[name] = amax * room
    return found
