"""Pack a model's weights in place, of linear layers and experts: NVFP4, or FP8."""

from __future__ import annotations

import logging
from typing import Any, Sequence

from torch import nn

from .adapters import adopt
from .calibration import Calibration
from .checkpoints.save_and_load import let_transformers_save
from .choose import choose_weights
from .formats import FORMATS, Settings
from .linear_layers import unwrapped
from .pack_as_trained import check_arguments, pack_as_trained
from .pack_report import PackReport, PackRow
from .packer import Packer
from .use_fp8_cache import batches_for, cache_scales, check_kind, use_fp8_cache

log = logging.getLogger("fp8_compile")


def pack(
    model: nn.Module,
    format: str | None = None,
    method: str | None = None,
    calibration: Calibration | None = None,
    exclude: Sequence[str] = (),
    activations: str | None = None,
    scales: str | nn.Module | None = None,
    kv_cache: str | None = None,
    *,
    include: Sequence[str] = ("*",),
    block_size: int = 16,
    sequential: bool | None = None,
    progress: bool = True,
    **options: Any,
) -> PackReport:
    """Replace the weights of linear layers and experts by packed ones, in place; the report says what became of each.

    ``format`` is "nvfp4" by default, or "fp8", "fp8_blocks", "mxfp8".
    ``method`` is one of ``quantize_nvfp4``'s, by default "gptq" with a calibration and "sweep" without; ``options``
    are that method's. ``exclude`` and ``include`` are globs on dotted names; output heads are left alone unless
    ``include`` names them. ``activations``: None keeps inputs exact. Of NVFP4: "int8" rounds them by blocks of 16 as
    they come, for the fastest CPU kernels; "nvfp4" for the tensor cores of sm_100. Of FP8: "fp8" rounds them to E4M3,
    by static scales, the calibration's amax / 448, or without a calibration each row by its own amax. Inputs of experts
    stay exact.

    ``sequential``: layers are packed in the order in which they run, each by what its inputs are now that the layers
    before it are packed. That needs the calibration's batches a second time: it is the default where they are a list.
    It costs one run of the batches, as far as the layer, for every group of layers that share an input.

    ``scales="training"``: one grid from training to serving. Weights get the codes and scales that a training forward
    of ``backend="fp8"`` has for them, inputs are rounded as there, and the recipe says which format that is; what
    training left in high precision stays. For a copy of the model, ``scales`` is the model that was trained.

    ``kv_cache="fp8"``: the caches that ``generate`` makes store keys and values in E4M3, each token of each head by a
    scale of its own, or with "fp8_static" by one per head, from the calibration's batches (``Fp8Cache``).
    """
    root = unwrapped(model)
    check_kind(kv_cache, root)
    batches = batches_for(kv_cache, calibration)
    if scales is not None:
        given = {"method": method, "calibration": calibration, "activations": activations, "sequential": sequential}
        check_arguments({**{name: one for name, one in given.items() if one is not None}, **options})
        return _finished(root, pack_as_trained(root, scales, format, include, exclude, progress), kv_cache)
    format = format or "nvfp4"
    calibrated = calibration is not None
    settings = settings_of(format, method, activations, calibrated, block_size, options)
    chosen, stacks, skipped = choose_weights(root, include, exclude)
    if not chosen and not stacks:
        raise ValueError(
            f"nothing to pack: {_reasons(skipped) or 'the model has no linear layers and no experts'}; see exclude"
        )
    settings.format.check_method(settings.method, calibrated, next(iter([*chosen, *stacks])))
    packer = Packer(root, chosen, stacks, settings)
    if calibration is not None and settings.format.needs_hessian(settings.method):
        packer.pack_calibrated(calibration, sequential, progress)
    else:
        packer.pack_all(calibration, progress)
    return _finished(root, [*packer.rows, *skipped], kv_cache, batches)


def _finished(
    root: nn.Module, rows: list[PackRow], kv_cache: str | None, batches: Sequence[Any] = ()
) -> PackReport:
    let_transformers_save(root)
    adopt(root)
    if kv_cache is not None:
        use_fp8_cache(root, cache_scales(root, batches) if batches else None)
    report = PackReport(tuple(rows))
    log.info("%s", report.summary())
    return report


def settings_of(
    format: str,
    method: str | None,
    activations: str | None,
    calibrated: bool,
    block_size: int,
    options: dict[str, Any],
) -> Settings:
    """The arguments of ``pack``, checked."""
    if format not in tuple(FORMATS):
        raise ValueError(f"format={format!r} is unknown; expected one of: {', '.join(FORMATS)}")
    chosen = FORMATS[format]
    if activations not in chosen.activations:
        expected = ", ".join(map(repr, chosen.activations))
        raise ValueError(f"activations={activations!r} is unknown to format={format!r}; expected one of: {expected}")
    chosen.check(method, options, activations, calibrated)
    return Settings(chosen, chosen.method(method, calibrated), activations, block_size, options)


def _reasons(rows: list[PackRow]) -> str:
    return "; ".join(f"{row.name}: {row.reason}" for row in rows[:4])
