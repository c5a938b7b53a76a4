"""Pack the weights of a model one after the other, in place, and measure what each lost."""

from __future__ import annotations

from collections import Counter
from typing import Callable, Mapping

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .calibrate import run_batch
from .calibration import Calibration
from .expert_stacks import ExpertStack
from .finished_blocks import FinishedBlocks
from .formats import Settings
from .input_scales import check_seen
from .linear_layers import weight_of
from .pack_report import PackRow
from .packable import LayerWeight, Packable, StackWeight
from .packed_linear import PackedLinear
from .packed_weight import PackedWeight


class Packer:
    """Packs the weights of linear layers and stacks of experts, by their names in the model.

    Weights that are tied share what the first of them became. ``rows`` has what became of each, in order.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Mapping[str, nn.Module],
        stacks: Mapping[str, ExpertStack],
        settings: Settings,
    ) -> None:
        self.root, self.layers, self.stacks, self.settings = root, layers, stacks, settings
        self.weights: dict[str, Packable] = {name: LayerWeight(layer) for name, layer in layers.items()}
        self.weights |= {name: StackWeight(stack) for name, stack in stacks.items()}
        counts = Counter(id(weight.parameter) for weight in self.weights.values())
        self.tied = {key for key, count in counts.items() if count > 1}
        self.done: dict[int, PackedWeight] = {}  # by id of the parameter, for those that are tied
        self.rows: list[PackRow] = []
        self.shared = settings.format.shared_scales(
            layers, lambda name: weight_of(layers[name]).detach(), settings.method
        )
        self.input_scales: dict[str, Tensor] = {}  # of the layers that have static ones

    def pack_all(self, calibration: Calibration | None, progress: bool) -> None:
        """Pack by a method that needs no calibration; what there is gives inputs their scales."""
        hessians = Hessians()
        if calibration is not None:
            self.input_scales = self.settings.format.input_scales(self.layers, calibration)
            if self.settings.format.measures_on_inputs and calibration.keeps_hessians:
                hessians = Hessians(calibration)
        for name in tqdm(self.weights, desc=f"pack {self.settings.method}", disable=not progress):
            self.pack(name, hessians)

    def pack_calibrated(self, calibration: Calibration, sequential: bool | None, progress: bool) -> None:
        """Pack by a method that weighs errors by the inputs, in the order in which the layers ran."""
        if sequential and calibration.batches is None:
            raise ValueError(
                "sequential=True runs the calibration's batches again, but they came from an iterator; give it a list"
            )
        again = calibration.batches if sequential or sequential is None else None
        groups = self._groups(calibration)
        check_seen(self.layers, calibration)
        finished = FinishedBlocks(self.root, self.weights)
        for number, group in enumerate(tqdm(groups, desc=f"pack {self.settings.method}", disable=not progress)):
            statistics = calibration
            if number and again is not None:
                statistics = Calibration()
                layers = {name: self.layers[name] for name in group if name in self.layers}
                stacks = {name: self.stacks[name] for name in group if name in self.stacks}
                for index, batch in enumerate(again):
                    with finished.remembering(index):
                        run_batch(self.root, batch, statistics, layers, stacks, stop=True)
            finished.packed(group)
            if group[0] in self.stacks:
                # Packed layers before an expert may send it other tokens, or none.
                self.pack(group[0], Hessians(statistics, calibration))
                continue
            hessians = Hessians(statistics)
            for name in group:
                layer, mean = self.layers[name], statistics.mean(name)
                wanted = weight_of(layer).detach().to(torch.float32) @ calibration.mean(name)
                self.pack(name, hessians)
                _correct_bias(layer, wanted, mean)
        for name in self.stacks:
            if [name] not in groups:  # no token reached it, or its inputs were not recorded
                self.pack(name, Hessians())

    def _groups(self, calibration: Calibration) -> list[list[str]]:
        """Layers that share their input together, and each stack by itself, in the order in which they ran."""
        groups: list[list[str]] = []
        left = dict.fromkeys(self.stacks)
        for group in calibration.groups():
            stack = group[0].rpartition(".")[0]  # where it is an expert's
            if stack in left:
                del left[stack]
                groups.append([stack])
            groups.append([name for name in group if name in self.layers])
        return [group for group in groups if group]

    def pack(self, name: str, hessian_of: Callable[[str], Tensor | None]) -> None:
        """Pack one weight. ``hessian_of`` has the Hessian of each matrix by its name in a calibration, or None."""
        weight, settings, input_scale = self.weights[name], self.settings, self.input_scales.get(name)
        key, shape, before = id(weight.parameter), weight.shape, weight.parameter.nbytes
        if (twin := self.done.get(key)) is not None:
            inputs = weight.inputs(weight.share(twin, settings, input_scale), settings)
            self._report(name, shape, settings.method, before, 0, reason=_joined("tied", inputs))
            return
        quantized, error, unseen = [], _RelativeError(), 0
        for label, calibrated, matrix in weight.matrices(name):
            hessian, own = hessian_of(calibrated), settings
            if hessian is None and settings.format.needs_hessian(settings.method):
                own, unseen = settings.without_hessian(), unseen + 1
            quantized.append(own.quantize(matrix, hessian, name=label, shared=self.shared.get(name)))
            error.add(matrix, quantized[-1].dequantize(), hessian)
        packed = weight.replace(quantized, settings, input_scale)
        if key in self.tied:
            self.done[key] = packed
        method, missing, fallback = settings.method, "", settings.format.fallback
        if unseen == len(quantized):
            method, missing = fallback, f"its inputs were not calibrated: packed by {fallback}"
        elif unseen:
            missing = f"{unseen} of {shape[0]} experts saw no token: packed by {fallback}"
        reason = _joined(missing, weight.inputs(packed, settings))
        self._report(name, shape, method, before, packed.memory_bytes(), error.value(), reason)

    def _report(
        self,
        name: str,
        shape: tuple[int, ...],
        method: str,
        before: int,
        after: int,
        error: float = float("nan"),
        reason: str = "",
    ) -> None:
        self.rows.append(PackRow(name, shape, self.settings.format.name, method, before, after, error, reason))


class Hessians:
    """Hessians of matrices by their names, each from the first of some calibrations that saw its inputs; or None."""

    def __init__(self, *calibrations: Calibration) -> None:
        self.calibrations = calibrations
        self.last: tuple[Calibration, str, Tensor] | None = None  # layers that share their inputs share one tensor

    def __call__(self, name: str) -> Tensor | None:
        seen = next((one for one in self.calibrations if name in one.names), None)
        if seen is None:
            return None
        if self.last is None or self.last[0] is not seen or not seen.shares(name, self.last[1]):
            self.last = seen, name, seen.hessian(name)
        return self.last[2]


class _RelativeError:
    """|error| / |output| on the calibration's inputs, over all matrices that have a Hessian; of the weights themselves
    if none has one: a weight's own error does not compare with an output's."""

    def __init__(self) -> None:
        self.powers = {True: torch.zeros(2), False: torch.zeros(2)}  # of error and weight, with and without a Hessian

    def add(self, before: Tensor, after: Tensor, hessian: Tensor | None) -> None:
        pair = _power(after - before, hessian).clamp(min=0), _power(before.to(torch.float32), hessian)
        self.powers[hessian is not None] += torch.stack(pair).cpu()

    def value(self) -> float:
        wrong, whole = self.powers[bool(self.powers[True].any())]
        return float((wrong / whole.clamp(min=1e-30)).sqrt())


def _power(w: Tensor, hessian: Tensor | None) -> Tensor:
    """The power of the output on the calibration's inputs, or of the weight itself if there is no Hessian."""
    return (w if hessian is None else w @ hessian.to(w.device)).mul(w).sum()


def _correct_bias(layer: nn.Module, wanted: Tensor, mean: Tensor) -> None:
    """Give the output the mean that it had before anything was packed: what rounding does to all tokens alike."""
    assert isinstance(layer, PackedLinear)
    if layer.bias is not None:
        with torch.no_grad():
            layer.bias.add_(wanted - layer.dequantize() @ mean)


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))
