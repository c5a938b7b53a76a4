"""What delayed scaling remembers of a model: one pool of amax histories and scales, shared by all its graphs.

A slot is one quantized tensor, named ``blocks.0.mlp.up#0.input``: the module, which of its matmuls, the operand's role.
Slots lie in pages (``scaling_page.py``). A graph is compiled with places in pages fixed (``graph_pool.py``); one that
needs more slots than the pages have left gets a page more.
"""

from __future__ import annotations

import re
import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Protocol

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import innermost_fn, reset_code
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import increment_version

from fp8_compile.kernels.delayed_scaling import ENTERED, PASSES, QUANT
from fp8_compile.passes.find_matmuls import Role
from fp8_compile.passes.slot import BACKWARD, Place, Slot

from .module_names import compiled_root, frame_code, modules_read, plain_module
from .pass_recorder import PassRecorder
from .scaling_page import Page
from .scaling_stats import StatsRow, StatsTable, stats_row
from .state_handling import handling_of

if TYPE_CHECKING:
    from .weight_cache import WeightCache

SAVED = ("scale", "amax_history", "counts", "largest")


class Calibration(Protocol):
    """What :meth:`ScalingState.prime` asks of ``fp8_compile.calibrate``'s result."""

    def amax(self, name: str) -> float | Tensor:
        """The largest magnitude that a module's input had; KeyError or ValueError for one that was not looked at."""
        ...


class ScalingState:
    """The state of one model. :func:`scaling_state` finds it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self.pages: list[Page] = []
        self._waiting: dict[str, dict[str, Tensor]] = {}  # loaded, for slots that no graph has asked for yet
        self.recorders: list[PassRecorder] = []  # of graphs that are dumped with stats
        self._calibration: Calibration | None = None
        self.gradient_unit = 1.0  # the loss scale: gradients inside graphs are that many times as large
        self.steps: int | None = None  # of the optimizer; None: nobody counts them
        self.epoch = 0  # goes up when histories are replaced: whoever believed that they were there looks again
        self.updates = 0  # of all pages at once, where amaxes are held until the optimizer's step
        self._weights: WeightCache | None = None
        self._codes: list[CodeType] = []  # of frames that were compiled with this state

    def settle(self) -> None:
        """Bring histories and scales up to date with the last pass."""
        for index in range(len(self.pages)):
            self.settle_page(index)

    def settle_page(self, index: int) -> None:
        if not self.held:
            self.pages[index].settle()

    @property
    def model(self) -> nn.Module | None:
        return self._model() if self._model is not None else None

    @property
    def held(self) -> bool:
        """Whether amaxes wait for :meth:`update`; otherwise each pass begins with the update for the one before."""
        return handling_of(self.model).held

    def update(self) -> None:
        """Take over the amaxes that were held."""
        for page in self.pages:
            page.settle()
            increment_version(page.scales)  # a forward saved them as they were: its backward must not read others
        self.updates += 1

    @property
    def weights(self) -> WeightCache | None:
        """FP8 copies of the model's weights, where an optimizer is attached."""
        from .weight_cache import WeightCache

        if not handling_of(self.model).cached:
            self._weights = None
        elif self._weights is None:
            self._weights = WeightCache(self)
        return self._weights

    def compiled_with(self, code: CodeType) -> None:
        if not any(code is known for known in self._codes):
            self._codes.append(code)

    def recompile(self) -> bool:
        """Have Dynamo compile again what was compiled with this state; whether there was any."""
        codes, self._codes = self._codes, []
        for code in codes:
            reset_code(code)
        return bool(codes)

    def unit(self, direction: str) -> float:
        """By how much graphs multiply the tensors whose amaxes become known in that direction."""
        return self.gradient_unit if direction == BACKWARD else 1.0

    def set_gradient_unit(self, unit: float) -> None:
        """The loss scale has changed: bring what is known of gradients to the new unit, exactly for powers of two."""
        if unit != self.gradient_unit:
            self.gradient_unit = unit
            for page in self.pages:
                if page.kind.direction == BACKWARD:
                    page.set_unit(unit)

    def slots(self) -> Iterator[tuple[Slot, Place]]:
        """Every slot and where it lies."""
        for index, page in enumerate(self.pages):
            for row, slot in enumerate(page.slots):
                yield slot, Place(index, row)

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: ``<slot>.scale``, ``.amax_history``, ``.counts`` and ``.largest``, copies of the state."""
        self.settle()
        rows = {str(slot): self.pages[place.page].row(place.row) for slot, place in self.slots()}
        rows = self._waiting | rows
        return {f"{slot}.{field}": tensor for slot, row in rows.items() for field, tensor in row.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take a saved state over, before or after the model is compiled. One that does not fit changes nothing."""
        rows = _by_slot(state_dict)
        places = {str(slot): place for slot, place in self.slots()}
        self._check(rows, places)
        for slot, row in rows.items():
            if slot in places:
                self.pages[places[slot].page].set_row(places[slot].row, row)
        self._waiting = {slot: row for slot, row in rows.items() if slot not in places}
        self.epoch += 1

    def prime(self, calibration: Calibration) -> None:
        """Let inputs begin with the amaxes of a calibration, as if a pass had seen them: of slots that are there, and
        of those that graphs will ask for."""
        self._calibration = calibration
        inputs = [(slot, place) for slot, place in self.slots() if slot.role is Role.INPUT]
        primed = [self._prime(slot, self.pages[place.page], place.row) for slot, place in inputs]
        if inputs and not any(primed):
            names = ", ".join(sorted({slot.module for slot, _ in inputs})[:5])
            raise ValueError(
                f"the calibration knows none of the model's quantized inputs ({names}); expected one of the same model"
            )

    def _prime(self, slot: Slot, page: Page, row: int) -> bool:
        if self._calibration is None or slot.role is not Role.INPUT:
            return False
        try:
            amax = float(self._calibration.amax(slot.module))
        except (KeyError, ValueError):  # not a module that was calibrated: a matmul outside any layer
            return False
        page.prime(row, amax)
        return True

    def reset(self) -> None:
        """Forget all histories, as when weights or data are replaced by very different ones: the next pass takes each
        tensor's scale from the tensor itself, as the first one did."""
        for page in self.pages:
            page.clear()
        self._waiting.clear()
        self._calibration = None
        self.epoch += 1

    def stats(self) -> StatsTable:
        """One row a slot: what was saturated, what was flushed to zero, amax, scale, signal to quantization noise."""
        self.settle()
        return StatsTable(self._stats_rows())

    def _stats_rows(self) -> list[StatsRow]:
        rows = []
        for slot, place in self.slots():
            page, row = self.pages[place.page], place.row
            entered, scale = page.counts[ENTERED, row], page.scales[QUANT, row] * page.unit
            rows.append(stats_row(str(slot), page.history[row] / page.unit, entered, scale, page.stats[row]))
        return rows

    def reset_stats(self) -> None:
        """Count from zero; scales and histories stay."""
        for page in self.pages:
            page.stats.data.zero_()

    def record(self, step: int | None = None) -> None:
        """Write amaxes, scales and counts of now to the dump folders, for the charts of their pages; ``step`` is what
        the charts call this moment. Does nothing unless both ``stats`` and ``dump`` are on.

        Without it every pass of a graph is recorded by itself, when the next one begins; from the first call on,
        only calls are."""
        for recorder in self.recorders:
            recorder.record(step)

    def without_history(self, places: Iterable[Place]) -> bool:
        """Whether some of the slots have never seen a finite amax above zero. Waits for the device."""
        self.settle()
        rows: dict[int, list[int]] = {}
        for place in places:
            rows.setdefault(place.page, []).append(place.row)
        return any(bool((self.pages[page].scales[QUANT, some] == 0).any()) for page, some in rows.items())

    def passes(self, places: Iterable[Place]) -> int:
        """How many passes these slots have seen at most. Waits for the device."""
        self.settle()
        return max((int(self.pages[place.page].counts[PASSES, place.row]) for place in places), default=0)

    def start_at_one(self, places: Iterable[Place]) -> None:
        """Give slots a scale before they have a history."""
        for place in places:
            self.pages[place.page].scales.data[:, place.row] = 1.0

    def take_waiting(self, slot: Slot, page: Page, row: int) -> None:
        """Fill a new slot with what was loaded for it, or calibrated, before it was there."""
        with unset_fake_temporarily(), torch.no_grad():  # passes run on fake tensors; the state is real
            if (saved := self._waiting.get(str(slot))) is not None:
                _check_length(str(slot), saved, page.kind.length)
                page.set_row(row, self._waiting.pop(str(slot)))
            else:
                self._prime(slot, page, row)

    def _check(self, rows: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, Place]) -> None:
        missing = sorted(set(places) - set(rows))
        unknown = sorted(slot for slot in set(rows) - set(places) if not self._may_have(slot))
        if missing or unknown:
            kinds = {"missing": missing, "unknown": unknown}
            parts = [f"{kind}: {', '.join(slots)}" for kind, slots in kinds.items() if slots]
            raise ValueError(
                f"the scaling state does not fit the model; slots {'; '.join(parts)}. "
                "Expected a state_dict() of a model with the same modules and options"
            )
        for slot, place in places.items():
            _check_length(slot, rows[slot], self.pages[place.page].kind.length)

    def _may_have(self, slot: str) -> bool:
        """Whether a slot that no graph has asked for yet can be one of this model: by the first part of its name, since
        modules kept in plain lists and the like have names that the model does not know."""
        model = self.model
        first = re.split(r"[.\[]", slot.rpartition("#")[0])[0]
        return model is None or not first or hasattr(model, first)


_states: weakref.WeakKeyDictionary[Any, ScalingState] = weakref.WeakKeyDictionary()  # by module, or by code
_of_several: dict[tuple[weakref.ref[nn.Module], ...], ScalingState] = {}  # of functions that run several modules
_newest: weakref.WeakKeyDictionary[Any, weakref.ref[ScalingState]] = weakref.WeakKeyDictionary()  # by code


def scaling_state(model: nn.Module | Callable[..., Any]) -> ScalingState:
    """The state of a model, plain or compiled; of a compiled function, that of the module or modules it runs."""
    model = plain_module(model)
    if isinstance(model, nn.Module):
        return _states.setdefault(model, ScalingState(model))
    if not callable(model):
        raise TypeError(f"scaling_state expects a module or a compiled function, got {type(model).__name__}")
    function = innermost_fn(model)
    own = [module for module in _reachable(function) if module in _states]
    if len(own) == 1:
        return _states[own[0]]
    newest = _newest[function.__code__]() if function.__code__ in _newest else None
    return newest or _states.setdefault(function.__code__, ScalingState())


def states_within(model: nn.Module) -> dict[str, ScalingState]:
    """The states of a model and of modules in it that were compiled by themselves, by their dotted names."""
    return {name: _states[module] for name, module in model.named_modules() if module in _states}


def state_of_compilation(gm: fx.GraphModule) -> ScalingState:
    """The state of what Dynamo is compiling: of the compiled module, or of those that a compiled function runs."""
    root, code = compiled_root(), frame_code()
    modules = [root] if root is not None else list(modules_read(gm).values())
    if len(modules) == 1:
        state = scaling_state(modules[0])
    elif modules:
        state = _state_of_several(modules)
    else:
        return _states.setdefault(code, ScalingState()) if code is not None else ScalingState()
    if code is not None:
        _newest[code] = weakref.ref(state)
        state.compiled_with(code)
    return state


def _state_of_several(modules: list[nn.Module]) -> ScalingState:
    key = tuple(weakref.ref(module) for module in modules)
    if key not in _of_several:
        _of_several[key] = ScalingState()
        for module in modules:
            weakref.finalize(module, _of_several.pop, key, None)
    return _of_several[key]


def _reachable(function: Any) -> list[nn.Module]:
    """The modules that a function has in its closure, or that the object has whose method it is."""
    owner = getattr(function, "__self__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_full(cell)]
    seen = [owner, *vars(owner).values()] if hasattr(owner, "__dict__") else []
    candidates = [getattr(item, "_orig_mod", item) for item in (*cells, *seen)]
    return [item for item in candidates if isinstance(item, nn.Module)]


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _by_slot(state_dict: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    rows: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state_dict.items():
        slot, _, field = key.rpartition(".")
        rows.setdefault(slot, {})[field] = tensor
    bad = sorted(slot for slot, row in rows.items() if set(row) != set(SAVED))
    if bad:
        raise ValueError(
            f"slots {', '.join(bad)} are not whole; expected {', '.join(SAVED)} of each, as state_dict() gives"
        )
    for slot, row in rows.items():
        if not 0 <= (scale := float(row["scale"])) < float("inf"):
            raise ValueError(f"slot {slot} has a scale of {scale}; expected a finite one, 0 before its first pass")
    return rows


def _check_length(slot: str, row: Mapping[str, Tensor], length: int) -> None:
    if (got := row["amax_history"].numel()) != length:
        raise ValueError(
            f"slot {slot} was saved with a history of {got}; expected amax_history_len={length}: set it to {got}"
        )
