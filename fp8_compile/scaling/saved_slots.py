"""Saved scaling states: what a file gave us is checked and renamed before any of it is used.

    {"0#0.input.scale": ..., "0#0.input.amax_history": ..., ...}  ->  {"0#0.input": {"scale": ..., ...}}

A state comes from a file, so that anything can be in it. Whatever does not fit is an error that names the slot, what
was expected and what was found.
"""

from __future__ import annotations

import re
from typing import Any, Collection, Mapping

import torch
from torch import Tensor, nn

from fp8_compile.kernels.delayed_scaling import COUNTERS
from fp8_compile.kernels.formats import FORMATS
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import Slot

Row = dict[str, Tensor]  # of a slot: the tensors of SAVED
SAVED = ("scale", "amax_history", "counts", "largest")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
FEWEST_COUNTERS = 2  # version 0.1 saved two
LARGEST = sorted({format.max for format in FORMATS})
_SLOT = re.compile(rf"(?s)(?P<product>.*)#\d+\.(?:{'|'.join(map(str, Role))})(?:\[\d+\])?")


class SavedSlots:
    """Rows that were loaded for slots that no graph has asked for yet, and the names that version 0.1 gave to slots."""

    def __init__(self) -> None:
        self.waiting: dict[str, Row] = {}
        self._old_names: dict[str, set[Slot]] = {}  # version 0.1 named slots by module and not by parameter
        self._loaded_by_old_name: set[str] = set()

    def take(self, slot: Slot, old_name: str, length: int) -> Row | None:
        """The row that waits for a slot with a history of ``length``; None where none does."""
        name = str(slot)
        self._old_names.setdefault(old_name, set()).add(slot)
        if name not in self.waiting and (old_name in self.waiting or old_name in self._loaded_by_old_name):
            name = self._by_old_name(old_name)
            self.waiting[name] = self.waiting.pop(old_name)
            self._loaded_by_old_name.add(old_name)
        if name not in self.waiting:
            return None
        check_length(name, self.waiting[name], length)
        return self.waiting.pop(name)

    def renamed(self, rows: Mapping[str, Row], known: Collection[str]) -> dict[str, Row]:
        """Rows that were saved by version 0.1 under today's names, of slots that graphs have asked for."""
        out: dict[str, Row] = {}
        for name, row in rows.items():
            new = self._by_old_name(name) if name not in known and name in self._old_names else name
            if new in out or (new != name and new in rows):
                raise ValueError(
                    f"slot {new} is in the saved state twice, also as {name}, which is what version 0.1 called it; "
                    "expected a state_dict() of one version"
                )
            out[new] = row
        return out

    def _by_old_name(self, name: str) -> str:
        """Today's name of a slot that was saved by version 0.1."""
        shared = sorted(map(str, self._old_names[name]))
        if len(shared) > 1:
            raise ValueError(
                f"the saved slot {name} was shared by tensors that have slots of their own now: {', '.join(shared)}; "
                "expected a state saved by this version. Leave the scaling state out: the first step takes each "
                "tensor's scale from the tensor itself"
            )
        return shared[0]


def read_slots(state_dict: Mapping[str, Tensor]) -> dict[str, Row]:
    """The rows of a saved state by slot, as copies; an error unless each is whole and could be of some slot."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a scaling state is a dict of tensors, as state_dict() gives, got {type(state_dict).__name__}")
    rows: dict[str, Any] = {}
    for key, tensor in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"the scaling state has the key {key!r}; expected names such as '0#0.input.scale'")
        slot, _, field = key.rpartition(".")
        rows.setdefault(slot, {})[field] = tensor
    bad = sorted(slot for slot, row in rows.items() if set(row) != set(SAVED))
    if bad:
        raise ValueError(
            f"slots {_listed(bad)} are not whole, or have other fields; expected {', '.join(SAVED)} of each, as "
            "state_dict() gives"
        )
    unnamed = sorted(slot for slot in rows if not _SLOT.fullmatch(slot))
    if unnamed:
        raise ValueError(
            f"{_listed(unnamed)}: not the name of a slot; expected LAYER#NUMBER.ROLE such as '0#0.input', with a role "
            f"of {', '.join(map(str, Role))}"
        )
    return {slot: _read_row(slot, row) for slot, row in rows.items()}


def check_fits(rows: Mapping[str, Row], lengths: Mapping[str, int], model: nn.Module | None) -> None:
    """Raise unless the rows are those of a model's slots; ``lengths``: of the histories of slots that are there."""
    missing = sorted(set(lengths) - set(rows))
    unknown = sorted(slot for slot in set(rows) - set(lengths) if not _may_have(model, slot))
    if missing or unknown:
        kinds = {"missing": missing, "unknown": unknown}
        parts = [f"{kind}: {', '.join(slots)}" for kind, slots in kinds.items() if slots]
        raise ValueError(
            f"the scaling state does not fit the model; slots {'; '.join(parts)}. "
            "Expected a state_dict() of a model with the same modules and options"
        )
    for slot, length in lengths.items():
        check_length(slot, rows[slot], length)


def check_length(slot: str, row: Row, length: int) -> None:
    if (got := row["amax_history"].numel()) != length:
        raise ValueError(
            f"slot {slot} was saved with a history of {got}; expected amax_history_len={length}: set it to {got}"
        )


def _may_have(model: nn.Module | None, slot: str) -> bool:
    """True if a slot that no graph has asked for yet can be one of this model. The first part of its name decides,
    since modules kept in plain lists and the like have names that the model does not know."""
    first = re.split(r"[.\[]", slot.rpartition("#")[0])[0]
    return model is None or not first or hasattr(model, first)


def _read_row(slot: str, row: Mapping[str, Any]) -> Row:
    scale, largest = (_numbers(slot, field, row[field], ()) for field in ("scale", "largest"))
    history = _numbers(slot, "amax_history", row["amax_history"], (None,))
    counts = _plain(slot, "counts", row["counts"], (None,))
    if not 0 <= float(scale) < float("inf"):
        raise ValueError(f"slot {slot} has a scale of {float(scale)}; expected a finite one, 0 before its first run")
    if float(largest) not in LARGEST:
        expected = ", ".join(f"{one:g}" for one in LARGEST)
        raise ValueError(
            f"slot {slot} has {float(largest):g} as its largest value; expected an FP8 format's, one of {expected}"
        )
    if not history.numel() or not bool(((history >= 0) & (history < torch.inf)).all()):
        raise ValueError(f"slot {slot} has an amax_history of {_shown(history)}; expected finite amaxes, at least one")
    if counts.dtype not in INTEGERS:
        raise TypeError(f"slot {slot}: counts is of {counts.dtype}; expected integers")
    most = torch.iinfo(torch.int32).max
    if not FEWEST_COUNTERS <= len(counts) <= COUNTERS or not all(0 <= count <= most for count in counts.tolist()):
        raise ValueError(
            f"slot {slot} has counts of {_shown(counts)}; expected {FEWEST_COUNTERS} to {COUNTERS} numbers from 0 on"
        )
    return {"scale": scale, "amax_history": history, "counts": counts.to(torch.int32), "largest": largest}


def _numbers(slot: str, field: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
    tensor = _plain(slot, field, value, shape)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"slot {slot}: {field} is of {tensor.dtype}; expected floating-point numbers")
    return tensor.to(torch.float32)


def _plain(slot: str, field: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
    """A copy of a dense tensor with numbers in it, of that shape; None stands for any size."""
    if not isinstance(value, Tensor):
        raise TypeError(f"slot {slot}: {field} is {type(value).__name__}; expected a tensor, as state_dict() gives")
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        kind = "meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
        raise TypeError(f"slot {slot}: {field} is a {kind} tensor; expected a dense one with numbers in it")
    if value.dim() != len(shape):
        expected = "one number, of shape []" if not shape else "one dimension"
        raise ValueError(f"slot {slot}: {field} has shape {list(value.shape)}; expected {expected}")
    return value.detach().clone()


def _shown(tensor: Tensor) -> str:
    values = tensor.tolist()
    return f"{values[:8]}" if len(values) <= 8 else f"{str(values[:8])[:-1]}, ...] ({len(values)} numbers)"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
