"""Pack a model's weights in place, of linear layers and experts: NVFP4, or FP8."""

from __future__ import annotations

import logging
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fp8_compile.kernels import fp8_inputs, fp8_weight
from fp8_compile.kernels.nvfp4 import ops as nvfp4
from fp8_compile.kernels.nvfp4.quantize import METHODS, NEED_HESSIAN, check_method, own_global_scale, quantize_nvfp4
from fp8_compile.selection import Selection

from .calibrate import run_batch
from .calibration import Calibration
from .expert_stacks import ExpertStack, expert_stacks
from .input_scales import check_seen, static_scales
from .linear_layers import fused_groups, is_linear, linear_layers, reason_against_packing, unwrapped, weight_of
from .pack_experts import StackPacker
from .pack_report import PackReport, PackRow
from .packed_experts import PackedStack
from .packed_linear import FP8Linear, NVFP4Linear, PackedLinear
from .unpacked_weights import other_weights

log = logging.getLogger("fp8_compile")
FORMATS = ("nvfp4", "fp8")
ACTIVATIONS = {"nvfp4": nvfp4.ACTIVATIONS, "fp8": fp8_inputs.ACTIVATIONS}


def pack(
    model: nn.Module,
    format: str = "nvfp4",
    method: str | None = None,
    calibration: Calibration | None = None,
    exclude: Sequence[str] = (),
    activations: str | None = None,
    *,
    include: Sequence[str] = ("*",),
    block_size: int = 16,
    sequential: bool | None = None,
    progress: bool = True,
    **options: Any,
) -> PackReport:
    """Replace the weights of linear layers and experts by packed ones, in place; the report says what became of each.

    ``method`` is one of ``quantize_nvfp4``'s, by default "gptq" with a calibration and "sweep" without; ``options``
    are that method's. ``exclude`` and ``include`` are globs on dotted names; output heads are left alone unless
    ``include`` names them. ``activations``: None keeps inputs exact. Of NVFP4: "int8" rounds them by blocks of 16 as
    they come, for the fastest CPU kernels; "nvfp4" for the tensor cores of sm_100. Of FP8: "fp8" rounds them to E4M3,
    by static scales, the calibration's amax / 448, or without a calibration each row by its own amax. Inputs of experts
    stay exact.

    ``sequential``: layers are packed in the order in which they run, each by what its inputs are now that the layers
    before it are packed. That needs the calibration's batches a second time: it is the default where they are a list.
    Its cost is one pass over the batches, as far as the layer, for every group of layers that share an input.
    """
    root = unwrapped(model)
    _check(format, method, activations, calibration, options)
    if format == "fp8":
        method = "rtn"
    method = method or ("gptq" if calibration is not None else "sweep")
    chosen, stacks, skipped = choose_weights(root, include, exclude)
    if not chosen and not stacks:
        raise ValueError(
            f"nothing to pack: {_reasons(skipped) or 'the model has no linear layers and no experts'}; see exclude"
        )
    check_method(method, calibration is not None, next(iter({**chosen, **stacks})))
    packer = _Packer(root, chosen, stacks, format, method, activations, block_size, options)
    if format == "fp8" or method not in NEED_HESSIAN:
        if format == "fp8" and calibration is not None:
            packer.input_scales = static_scales(chosen, calibration)
        weighs = format == "fp8" and calibration is not None and calibration.keeps_hessians
        for name in tqdm([*chosen, *stacks], desc=f"pack {method}", disable=not progress):
            if name in stacks:
                packer.pack_stack(name, *([calibration] if weighs else []))  # type: ignore[list-item]
            else:
                packer.pack(name, calibration.hessian(name) if weighs else None)  # type: ignore[union-attr]
    else:
        assert calibration is not None
        packer.pack_calibrated(calibration, sequential, progress)
    report = PackReport(tuple([*packer.rows, *skipped]))
    log.info("%s", report.summary())
    return report


def choose_weights(
    root: nn.Module, include: Sequence[str], exclude: Sequence[str]
) -> tuple[dict[str, nn.Module], dict[str, ExpertStack], list[PackRow]]:
    """The layers and the stacks of experts to pack, and a row with the reason for each other weight."""
    selection = Selection(_patterns("include", include), _patterns("exclude", exclude))
    selection.check(
        [name for name, _ in [*root.named_modules(), *root.named_parameters(remove_duplicate=False)] if name]
    )
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in root.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    chosen, skipped = {}, []
    for name, layer in linear_layers(root).items():
        reason = selection.reason_against(name, (f"{name}.weight",)) or reason_against_packing(layer)
        if reason is None:
            others = [other for other, module in owners[id(layer.weight)] if type(module) is not type(layer)]
            reason = f"its weight is tied to {others[0]}" if others else None
        if reason is None:
            chosen[name] = layer
        else:
            skipped.append(PackRow(name, _shape(layer), reason=reason))
    stacks = {}
    for name, stack in expert_stacks(root).items():
        reason = selection.reason_against(name.rpartition(".")[0], (name,)) or stack.reason_against_packing()
        if reason is None:
            stacks[name] = stack
        else:
            skipped.append(PackRow(name, tuple(stack.matrices.shape), reason=reason))
    return chosen, stacks, [*skipped, *_packed_already(root), *_others(root, owners)]


def _packed_already(root: nn.Module) -> list[PackRow]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, PackedLinear):
            shapes[name] = module.out_features, module.in_features
        elif isinstance(module, PackedStack):
            shapes[name.removesuffix("_packed")] = module.experts, module.out_features, module.in_features
    return [PackRow(name, shape, reason="packed already") for name, shape in shapes.items()]


def _others(root: nn.Module, owners: Mapping[int, Sequence[tuple[str, nn.Module]]]) -> list[PackRow]:
    """Rows of what is multiplied by, but not by a linear layer or experts."""
    known = {key for key, places in owners.items() if any(is_linear(module) for _, module in places)}
    known |= {id(stack.parameter) for stack in expert_stacks(root).values()}
    return [PackRow(name, shape, reason=reason) for name, (shape, reason) in other_weights(root, known).items()]


class _Packer:
    """Packs layers and stacks one after the other."""

    def __init__(
        self,
        root: nn.Module,
        layers: dict[str, nn.Module],
        stacks: dict[str, ExpertStack],
        format: str,
        method: str,
        activations: str | None,
        block_size: int,
        options: dict[str, Any],
    ) -> None:
        self.root, self.layers, self.format, self.method = root, layers, format, method
        self.activations, self.block_size, self.options = activations, block_size, options
        self.stacks, self.stack_packer = stacks, StackPacker(stacks, format, method, activations, block_size, options)
        self.rows: list[PackRow] = []
        self.done: dict[int, PackedLinear] = {}  # by id of the weight: tied layers share what it became
        self.kept: list[Tensor] = []  # so that no id is used twice
        self.global_scales = _shared_global_scales(layers, method) if format == "nvfp4" else {}
        self.input_scales: dict[str, Tensor] = {}  # of the layers that have static ones

    def pack_calibrated(self, calibration: Calibration, sequential: bool | None, progress: bool) -> None:
        if sequential and calibration.batches is None:
            raise ValueError(
                "sequential=True runs the calibration's batches again, but they came from an iterator; give it a list"
            )
        again = calibration.batches if sequential or sequential is None else None
        groups = self._groups(calibration)
        check_seen(self.layers, calibration)
        for number, group in enumerate(tqdm(groups, desc=f"pack {self.method}", disable=not progress)):
            statistics = calibration
            if number and again is not None:
                statistics = Calibration()
                layers = {name: self.layers[name] for name in group if name in self.layers}
                stacks = {name: self.stacks[name] for name in group if name in self.stacks}
                for batch in again:
                    run_batch(self.root, batch, statistics, layers, stacks, stop=True)
            if group[0] in self.stacks:
                self.pack_stack(group[0], statistics, calibration)
                continue
            hessian: Tensor | None = None
            for index, name in enumerate(group):
                if hessian is None or not statistics.shares(name, group[index - 1]):
                    hessian = statistics.hessian(name)
                wanted = _mean_output(self.layers[name], calibration.mean(name))
                self.pack(name, hessian)
                _correct_bias(self.layers[name], wanted, statistics.mean(name))
        for name in self.stacks:
            if [name] not in groups:  # no token reached it, or nobody asked
                self.pack_stack(name)

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

    def pack_stack(self, name: str, *calibrations: Calibration) -> None:
        """By the first calibration that saw an expert: those before it, packed, may send it other tokens, or none."""

        def hessian_of(expert: int) -> Tensor | None:
            own = f"{name}.{expert}"
            return next((one.hessian(own) for one in calibrations if own in one.names), None)

        self.rows.append(self.stack_packer.pack(name, hessian_of))

    def pack(self, name: str, hessian: Tensor | None) -> None:
        layer = self.layers[name]
        weight, dtype = weight_of(layer), layer.weight.dtype
        shape = tuple(weight.shape)
        if (twin := self.done.get(id(layer.weight))) is not None:
            _share(layer, twin)
            if isinstance(layer, FP8Linear):
                layer.use_activations(self.activations, self.input_scales.get(name))  # the input is its own
            reason = _joined("tied", _inputs(layer))
            self.rows.append(PackRow(name, shape, self.format, self.method, weight.nbytes, 0, reason=reason))
            return
        key, before = id(layer.weight), weight.detach()
        self.kept.append(layer.weight)
        if self.format == "fp8":
            codes, scales = fp8_weight.quantize(weight, name)
            FP8Linear.convert(layer, codes, scales, dtype, self.activations, self.input_scales.get(name))
        else:
            packed = quantize_nvfp4(
                weight,
                self.method,
                hessian,
                block_size=self.block_size,
                global_scale=self.global_scales.get(name),
                name=name,
                **self.options,
            )
            NVFP4Linear.convert(layer, packed, dtype, self.activations)
        assert isinstance(layer, PackedLinear)
        self.done[key] = layer
        error = _relative_error(before, layer.dequantize(), hessian)
        sizes = before.nbytes, layer.memory_bytes()
        self.rows.append(PackRow(name, shape, self.format, self.method, *sizes, error, reason=_inputs(layer)))
        if len(self.kept) and not _is_tied(self.root, self.kept[-1]):
            self.kept.pop()
            self.done.pop(key)


def _mean_output(layer: nn.Module, mean: Tensor) -> Tensor:
    return weight_of(layer).detach().to(torch.float32) @ mean


def _correct_bias(layer: nn.Module, wanted: Tensor, mean: Tensor) -> None:
    """Give the output the mean that it had before anything was packed: what rounding does to all tokens alike."""
    assert isinstance(layer, PackedLinear)
    if layer.bias is not None:
        with torch.no_grad():
            layer.bias += wanted - layer.dequantize() @ mean


def _inputs(layer: nn.Module) -> str:
    return layer.inputs if isinstance(layer, FP8Linear) else ""


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _is_tied(root: nn.Module, weight: Tensor) -> bool:
    return any(parameter is weight for module in root.modules() for parameter in module._parameters.values())


def _share(layer: nn.Module, twin: PackedLinear) -> None:
    """Make a layer what its tied twin has become, on the same tensors, with its own bias."""
    bias = layer._parameters.get("bias")
    layer.__class__ = type(twin)
    layer._parameters = {"bias": bias}
    layer._buffers = dict(twin._buffers)
    for field in ("in_features", "out_features", "dtype", "activations", "layout", "block_size"):
        if field in vars(twin):
            setattr(layer, field, getattr(twin, field))


def _shared_global_scales(layers: dict[str, nn.Module], method: str) -> dict[str, Tensor]:
    """One global scale for layers that servers fuse: the largest of theirs."""
    shared = {}
    for group in fused_groups(layers):
        largest = torch.stack([own_global_scale(weight_of(layers[name]).detach(), method) for name in group]).amax()
        if largest.isfinite():  # or the layer that is not says so itself
            shared.update(dict.fromkeys(group, largest))
    return shared


def _relative_error(before: Tensor, after: Tensor, hessian: Tensor | None) -> float:
    """|error| / |output| on the calibration's inputs; of the weight itself where there is no calibration."""
    before = before.to(torch.float32)
    error = after - before

    def power(w: Tensor) -> Tensor:
        return (w if hessian is None else w @ hessian).mul(w).sum()

    return float((power(error).clamp(min=0) / power(before).clamp(min=1e-30)).sqrt())


def _check(
    format: str,
    method: str | None,
    activations: str | None,
    calibration: Calibration | None,
    options: dict[str, Any],
) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; expected one of: {', '.join(FORMATS)}")
    if activations not in ACTIVATIONS[format]:
        expected = ", ".join(map(repr, ACTIVATIONS[format]))
        raise ValueError(
            f"activations={activations!r} is unknown to format={format!r}; expected one of: {expected}"
        )
    if format == "fp8" and (method not in (None, "rtn") or options):
        raise ValueError("format='fp8' has one method, 'rtn', without options; leave them out")
    if format == "fp8" and calibration is not None and activations is None:
        raise ValueError(
            "calibration: of format='fp8' it gives the inputs their scales, but activations=None keeps inputs exact; "
            "say activations='fp8', or leave the calibration out"
        )
    if method is not None and method not in METHODS:
        check_method(method, True, "pack")


def _patterns(field: str, patterns: Sequence[str]) -> tuple[str, ...]:
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f"{field} expects glob patterns on module names such as ('lm_head',), got {patterns!r}")
    return patterns


def _shape(layer: nn.Module) -> tuple[int, ...]:
    weight = layer._parameters.get("weight")
    return () if weight is None else tuple(weight_of(layer).shape)


def _reasons(rows: list[PackRow]) -> str:
    return "; ".join(f"{row.name}: {row.reason}" for row in rows[:4])
