"""Which modules may run a code that was compiled for one of them.

Dynamo compiles ``Block.forward`` once and runs the code for every block whose parameters look the same. That is right
for us, too, as long as all of them are treated alike: patterns and output heads leave the same layers alone, the
same gemms are in high precision for now, and a training loop asks the same of them. A guard on the module asks that at
every call; a module that differs is compiled by itself. The scaling state is not part of it: code is given that of the
module it runs for (``shared_code.py``).
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from torch import fx, nn

from fp8_compile.config import Config
from fp8_compile.output_heads import head_candidates
from fp8_compile.scaling.model_state import ModelState, model_state
from fp8_compile.scaling.requests import Changes
from fp8_compile.selection import Selection
from fp8_compile.torch_internals.dynamo import compiled_root, guard_by, modules_read
from fp8_compile.torch_internals.modules import unwrap

from .kept_blocks import kept_in
from .module_names import whole_model


@dataclasses.dataclass(frozen=True)
class Variant:
    """What code depends on beside its graph and the options of ``torch.compile``."""

    treatment: Any  # what is left alone in the module, and why
    cached: bool  # the code reads FP8 copies of weights
    held: bool  # it leaves the update of scales to the optimizer's step
    scaled: bool  # it has a loss scale
    wide: bool  # gradients of 16-bit parameters leave in FP32
    frozen: frozenset[str]  # inputs whose scales are fixed for inference
    high: Any  # gemms that are in high precision for now


def keep_apart(gm: fx.GraphModule, config: Config) -> None:
    """Guard the modules that a graph reads."""
    for source, module in modules_read(gm).items():
        guard_by([source], _Check(config, module), "what backend='fp8' does with the layers")


class _Check:
    """True of modules that the code of a graph is right for."""

    __name__ = "runs the same FP8 code"

    def __init__(self, config: Config, module: nn.Module) -> None:
        self.config, self.expected = config, variant_of(module, config)
        self._right: dict[int, int] = {}  # id of a module -> Changes.count when the code was last found right for it
        self._watched: dict[int, weakref.ref[nn.Module]] = {}
        # Code goes on for modules of a training loop that has ended, with the copies and the loss scale that it has.
        self.admitted: weakref.WeakSet[nn.Module] = weakref.WeakSet([module])

    def __call__(self, module: nn.Module) -> bool:
        key = id(module)
        if self._right.get(key) == Changes.count:
            return True
        if not self._is_right(unwrap(module)):
            return False
        self._right[key] = Changes.count
        self._watched[key] = weakref.ref(module, lambda _: self._right.pop(key, None))
        return True

    def _is_right(self, module: nn.Module) -> bool:
        now = variant_of(module, self.config)
        if now == self.expected:
            self.admitted.add(module)
            return True
        if module not in self.admitted:
            return False
        before = self.expected
        kept = dataclasses.replace(
            now, cached=now.cached or before.cached, scaled=now.scaled or before.scaled, wide=now.wide or before.wide
        )
        return kept == before


def variant_of(module: nn.Module, config: Config) -> Variant:
    state = model_state(module)
    requests, scalings = state.requests, list(state.loss_scalings)
    return Variant(
        _treatment(module, state, config),
        config.recipe == "delayed" and requests.cached,
        config.keeps_state and requests.held,
        config.loss_scale is not None or any(one.setting is not None for one in scalings),
        any(one.wide for one in scalings),
        state.frozen if config.keeps_state else frozenset(),
        tuple((name, high) for name, inner in module.named_modules() if (high := model_state(inner).high)),
    )


def _treatment(module: nn.Module, state: ModelState, config: Config) -> Any:
    """Which parts of a module patterns leave alone, and which of its weights may be those of output heads."""
    key = config.include, config.exclude, config.kept_blocks
    if key not in state.treatments:
        root = compiled_root() or module
        name = next((name for name, inner in root.named_modules() if inner is module), "")
        kept = kept_in(root, config)
        selection = Selection(config.include, config.exclude, {}, kept.names, kept.asked_for)
        heads = head_candidates(whole_model(root))
        parts = [selection.reason_against(part) is None for part, _ in module.named_modules(prefix=name)]
        weights = [
            (selection.reason_against("", (part,)) is None, heads.get(id(parameter)))
            for part, parameter in module.named_parameters(prefix=name)
        ]
        state.treatments[key] = tuple(parts), tuple(weights)
    return state.treatments[key]
