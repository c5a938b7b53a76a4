"""Delayed scaling: a tensor is quantized with a scale that was known before the tensor was.

    q          = fp8(clamp(x * quant_scale, -F, F) + 0 * x)      F: the largest value of the format
    amax       = max |x|                                         recorded for the runs to come

``0 * x`` makes Inf a NaN: the saturating cast alone would turn it into F and hide an overflow from a loss scaler.

After each run of the graph, for all slots at once (a slot is one tensor's place in the state):

    saturated   : amax * quant_scale > F, by more than rounding takes back       counted
    room        = sum of ceil(log2(amax * quant_scale / F)) over slots that were saturated and have not been part of
                  two runs since, limited by the format; over all graphs of a model, which share one tensor for it
    amax enters the history in place of the oldest one           if it is finite
    m           = max(history)                                   or the newest, or the 99th percentile
    quant_scale = F / (m * 2**(margin + room)), capped to be finite      if m > 0 and this is an ``interval``-th run
    dequant_scale = 1 / quant_scale

What a saturated tensor lost is missing in the amaxes of all tensors computed from it. ``room`` makes up for that: it
widens the scales of every slot until all of them, in whichever graph, have been quantized once more after the tensor
itself. So a jump which runs through many layers is over after one step.

State of C slots: amaxes [C] fp32, -1 where the slot was not part of the run; history [C, L] fp32, a ring; scales
[2, C] fp32, (quant, dequant); counts [10, C] int32, see ``RUNS`` and the names after it; room [1] int32, the sum above
over these slots and those of other graphs.

A quant_scale of 0 says that no amax has entered yet: such a tensor is quantized with its own amax. So is every tensor
whose slot has ``LOOK`` set, as in a model's first step.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import torch
from torch import Tensor

from .define_op import define
from .formats import E2M1, FORMATS, Format, format_of

QUANT, DEQUANT = 0, 1
# Rows of ``counts``. The first five count runs: all of them, those whose amax entered the history, those in which the
# tensor was saturated, lost more than half of its largest value, or was too small for its scale. The next two are the
# exponent by which it was saturated last, and for how many of its runs that still gives room. Then three settings:
# the margin, whether the tensor's own amax is to be used, and whether it is steady: weights neither cause nor get room.
RUNS, ENTERED, SATURATED, CLIPPED, SMALL, OVER, HOLD, MARGIN, LOOK, STEADY = range(10)
COUNTERS = 7
STATS_FIELDS = 7
RUNS_WITH_ROOM = 2
ABSENT = -1.0
PERCENTILE = 0.99
ABOVE_ROUNDING = 1 + 2.0**-20  # amax * (F / amax) may be a few units in FP32's last place above F
LARGEST_SCALE = torch.finfo(torch.float32).max


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a format can hold, as multiples of its largest value F."""

    saturated_above: float  # what rounds to F is not lost
    small_below: float  # log-normal data whose amax is there lose 2 dB to values that are flushed to zero
    most_room: int  # an exponent; beyond margin and room, small values would be lost

    @classmethod
    def of(cls, format: Format) -> Limits:
        if format == E2M1:  # its blocks have scales: what is above the largest of these saturates, as in E4M3
            return cls(1.0 + 2.0**-4 / 1.75, 2.0**-12, 6)
        significand = format.max / 2.0 ** (int(format.max).bit_length() - 1)
        half_step = 2.0**-format.significand_bits / significand
        wide = format.significand_bits == 3
        return cls(1.0 + half_step, 2.0**-20 if wide else 2.0**-8, 12 if wide else 6)


_LIMITS = {format.max: Limits.of(format) for format in FORMATS}
LARGEST = tuple(_LIMITS)  # values of formats


def limits_of(largest: float) -> Limits:
    """The limits of the format whose largest value that is."""
    return _LIMITS[largest]


def fits(reached: Tensor, largest: float) -> bool:
    """True if a tensor whose largest magnitude is scaled to that loses nothing by its scale."""
    limits = limits_of(largest)
    return bool((reached <= largest * limits.saturated_above) & (reached >= largest * limits.small_below))


def cast_delayed(x: Tensor, quant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The first formula above."""
    largest = format_of(dtype).max
    wide = x.contiguous().to(torch.float32)
    return ((wide * quant_scale).clamp(-largest, largest) + wide * 0.0).to(dtype)


def scale_of(amax: Tensor, largest: float, exponent: Tensor | None = None) -> Tensor:
    """``F / (amax * 2**exponent)``, finite and above 0."""
    reach = amax if exponent is None else (amax * power_of_two(exponent)).clamp_max(LARGEST_SCALE)
    return (reach.reciprocal() * largest).clamp_max(LARGEST_SCALE)  # what PyTorch makes of largest / reach, too


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` of int32, exactly."""
    return ((exponent + 127) << 23).view(torch.float32)


def first_scale(quant_scale: Tensor, amax: Tensor, largest: float) -> Tensor:
    """The scale as it is, or where there is none the one that tensorwise scaling gives for this amax; 1 if none."""
    usable = (amax > 0) & (amax < torch.inf)
    own = torch.where(usable, scale_of(amax, largest), 1.0)
    return torch.where(quant_scale > 0, quant_scale, own)


def update(
    history: Tensor,
    scales: Tensor,
    counts: Tensor,
    amaxes: Tensor,
    largest: float,
    algorithm: str = "max",
    interval: int = 1,
    elsewhere: Tensor | int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The update above: history, scales and counts after the run. ``algorithm="frozen"`` counts and changes nothing
    else. ``elsewhere``: the sum for ``room`` over slots of other graphs."""
    length, limits = history.shape[1], limits_of(largest)
    present = amaxes != ABSENT
    enters = present & (amaxes >= 0) & (amaxes < torch.inf)
    at_newest = torch.arange(length, device=history.device) == (counts[ENTERED] % length)[:, None]
    history = torch.where(at_newest & enters[:, None], amaxes[:, None], history)

    reached = amaxes * scales[QUANT]
    known = enters & (scales[QUANT] > 0) & (counts[LOOK] == 0)
    saturated = known & (reached > largest * limits.saturated_above)
    clipped = known & (reached > largest * 2.0)
    small = known & (amaxes > 0) & (reached < largest * limits.small_below)
    counted = counts[:OVER] + torch.stack([present, enters, saturated, clipped, small])
    flows = counts[STEADY] == 0
    over = torch.where(saturated & flows, _ceil_log2(reached * (1.0 / largest)), counts[OVER])
    hold = torch.where(saturated & flows, RUNS_WITH_ROOM, (counts[HOLD] - present.to(torch.int32)).clamp_min(0))
    counts = torch.cat([counted, torch.stack([over, hold]), counts[COUNTERS:]]).to(torch.int32)
    if algorithm == "frozen":
        return history, scales.clone(), counts

    needed = room_for(counts) if elsewhere is None else room_for(counts) + elsewhere
    room = torch.where(flows, needed.clamp(0, limits.most_room), 0)
    m = _summary(history, counts[ENTERED], algorithm)
    due = (present & ((counts[RUNS] % interval == 0) | (scales[QUANT] == 0))) | (room > 0)
    fresh = scale_of(m, largest, counts[MARGIN] + room)
    quant_scale = torch.where(due & (m > 0), fresh, scales[QUANT])
    dequant_scale = torch.where(quant_scale > 0, 1.0 / quant_scale, scales[DEQUANT])
    return history, torch.stack([quant_scale, dequant_scale]), counts


def room_for(counts: Tensor) -> Tensor:
    """What slots that were saturated need: the exponents by which they were, [1] int32."""
    return torch.where(counts[HOLD] > 0, counts[OVER], 0).sum(0, keepdim=True, dtype=torch.int32)


def _ceil_log2(x: Tensor) -> Tensor:
    """Of numbers above 1, Inf included: 1 for those up to 2, 2 for those up to 4, at most 32."""
    return (((x.view(torch.int32) + 0x7FFFFF) >> 23) - 127).clamp(0, 32)


def _summary(history: Tensor, entered: Tensor, algorithm: str) -> Tensor:
    """m of each slot, 0 where nothing has entered."""
    length = history.shape[1]
    if algorithm == "max":
        return history.amax(1)
    if algorithm == "most_recent":
        newest = ((entered - 1) % length).to(torch.int64)
        return history.gather(1, newest[:, None])[:, 0]
    # Linear between neighbours, over what has entered: zeros that fill a young history are below all of it.
    falling = history.sort(1, descending=True).values
    from_top = (1.0 - PERCENTILE) * (entered.clamp(1, length) - 1).to(torch.float32)
    above = from_top.floor().to(torch.int64)
    below = (above + 1).clamp_max(length - 1)
    high, low = (falling.gather(1, index[:, None])[:, 0] for index in (above, below))
    return high - (high - low) * (from_top - above)


def record(
    amaxes: Tensor, recorded: Sequence[Tensor], rows: Sequence[int], made: Sequence[Tensor] = ()
) -> Tensor:
    """The amaxes of a run: one per slot, or where a slot was recorded twice the larger; absent elsewhere.

    ``made``: tensors that are to be made in this run because a later one will read them; nothing is done with them.
    """
    return accumulate(torch.full_like(amaxes, ABSENT), recorded, rows)


def accumulate(
    amaxes: Tensor, recorded: Sequence[Tensor], rows: Sequence[int], made: Sequence[Tensor] = ()
) -> Tensor:
    """The amaxes of this run and of those since the last update, where not every run does that."""
    if not recorded:
        return amaxes.clone()
    index = torch.tensor(rows, dtype=torch.int64, device=amaxes.device)
    values = torch.cat([one.reshape(1) for one in recorded])
    # As integers a NaN is above all numbers; |x| is never negative, the mark for an absent slot is.
    return amaxes.view(torch.int32).scatter_reduce(0, index, values.view(torch.int32), "amax").view(torch.float32)


def count(x: Tensor, q: Tensor, quant_scale: Tensor, dequant_scale: Tensor, largest: float) -> Tensor:
    """[7] fp64: elements, saturated ones, ones flushed to zero, sum of x**2, sum of (x - dequantized)**2; no blocks, as
    ``block_counts.py`` counts them.

    Of finite elements; of others there is no error to speak of.
    """
    finite = x.abs() < torch.inf
    wide, coded = (torch.where(finite, tensor.to(torch.float32), 0.0) for tensor in (x, q))
    saturated = (wide * quant_scale).abs() > largest * ABOVE_ROUNDING
    flushed = (wide != 0) & (coded == 0)
    # FP32 would lose the squares of small gradients. Of FP8 Triton 3.7 makes no FP64 but by way of it, and Inductor
    # would take two casts in a row for one: the choice of the finite elements is between them.
    wide = wide.to(torch.float64)
    back = coded.to(torch.float64) * dequant_scale
    sums = [part.sum(dtype=torch.float64) for part in (finite, saturated, flushed, wide * wide, (wide - back) ** 2)]
    return torch.stack([*sums, *(sums[0].new_zeros(()) for _ in range(STATS_FIELDS - len(sums)))])


def add_counts(stats: Tensor, counted: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """``stats`` [C, 7] with what :func:`count` gave for some rows added."""
    by_row: dict[int, Tensor] = {}
    for row, one in zip(rows, counted):
        by_row[row] = by_row[row] + one if row in by_row else one
    # Not by an index: it would come from the host in every run, which waits for a GPU and can't be captured.
    nothing = stats.new_zeros(stats.shape[1])
    return stats + torch.stack([by_row.get(row, nothing) for row in range(stats.shape[0])])


def next_scales(amaxes: Tensor, history: Tensor, scales: Tensor, counts: Tensor, room: Tensor, *rule: Any) -> Tensor:
    """The scales of the run that begins: :func:`update` with the amaxes of the one before; none where to look."""
    return _known(_update(amaxes, history, scales, counts, room, *rule)[1], counts)


def _known(scales: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts[LOOK] == 0, scales, 0.0)


def _update(
    amaxes: Tensor,
    history: Tensor,
    scales: Tensor,
    counts: Tensor,
    room: Tensor,
    largest: float,
    algorithm: str,
    interval: int,
) -> tuple[Tensor, ...]:
    elsewhere = room - room_for(counts)
    new = update(history, scales, counts, amaxes, largest, algorithm, interval, elsewhere)
    return *new, elsewhere + room_for(new[2])


def update_in_place(
    amaxes: Tensor, history: Tensor, scales: Tensor, counts: Tensor, room: Tensor, known: Tensor, *rule: Any
) -> None:
    # .data: forward has saved the state of the gradients for backward, and autograd would find it changed.
    state = (history, scales, counts, room)
    for old, new in zip(state, _update(amaxes, history, scales, counts, room, *rule)):
        old.data.copy_(new)
    amaxes.data.fill_(ABSENT)
    known.copy_(_known(scales, counts))


def record_in_place(amaxes: Tensor, recorded: Sequence[Tensor], rows: Sequence[int]) -> None:
    amaxes.data.copy_(record(amaxes, recorded, rows))


def accumulate_in_place(amaxes: Tensor, recorded: Sequence[Tensor], rows: Sequence[int]) -> None:
    amaxes.data.copy_(accumulate(amaxes.data, recorded, rows))


def _fake_update(
    amaxes: Tensor, history: Tensor, scales: Tensor, counts: Tensor, room: Tensor, *rule: Any
) -> tuple[Tensor, ...]:
    return tuple(state.new_empty(state.shape) for state in (history, scales, counts, room))


# A run of the graph begins with the update that follows from the run before and ends with new amaxes. So the scales
# have no reader that the update must wait for, and one small tensor holds those of this run until backward needs them.
# Before a graph is split its ops are functional, as they must be; afterwards (names with _) they work in place.
_STATE = "Tensor history, Tensor scales, Tensor counts, Tensor room"
_IN_PLACE = "Tensor(b!) history, Tensor(c!) scales, Tensor(d!) counts, Tensor(e!) room"
_RULE = "float largest, str algorithm, int interval"
_RECORD = "Tensor[] recorded, int[] rows"
next_scales_op = define(
    f"next_scales(Tensor amaxes, {_STATE}, {_RULE}) -> Tensor",
    next_scales,
    lambda amaxes, history, scales, *arguments: scales.new_empty(scales.shape),
)
update_op = define(f"update_scales(Tensor amaxes, {_STATE}, {_RULE}) -> ({_STATE})", _update, _fake_update)
record_op = define(
    f"record_amaxes(Tensor amaxes, {_RECORD}, Tensor[] made) -> Tensor",
    record,
    lambda amaxes, *arguments: amaxes.new_empty(amaxes.shape),
)
accumulate_op = define(
    f"accumulate_amaxes(Tensor amaxes, {_RECORD}, Tensor[] made) -> Tensor",
    accumulate,
    lambda amaxes, *arguments: amaxes.new_empty(amaxes.shape),
)
add_counts_op = define(
    "add_counts(Tensor stats, Tensor[] counted, int[] rows) -> Tensor",
    add_counts,
    lambda stats, *arguments: stats.new_empty(stats.shape),
)
update_in_place_op = define(
    f"update_scales_(Tensor(a!) amaxes, {_IN_PLACE}, Tensor(f!) known, {_RULE}) -> ()",
    update_in_place,
    lambda *arguments: None,
    cpu="fp8_compile.kernels.cpu.update_scales:update_scales",
    cuda="fp8_compile.kernels.gpu.update_scales:update_in_place",
)
record_in_place_op = define(
    f"record_amaxes_(Tensor(a!) amaxes, {_RECORD}) -> ()",
    record_in_place,
    lambda *arguments: None,
    cpu="fp8_compile.kernels.cpu.update_scales:record_amaxes",
)
accumulate_in_place_op = define(
    f"accumulate_amaxes_(Tensor(a!) amaxes, {_RECORD}) -> ()",
    accumulate_in_place,
    lambda *arguments: None,
    cpu="fp8_compile.kernels.cpu.update_scales:accumulate_amaxes",
)
