"""Quantize a matrix to NVFP4 by any of the methods.

rtn            scale from the block's largest element                               kernels/nvfp4/rtn.py
four_over_six  that scale or 1.5 times it, by squared error                         sweep.py
sweep          the best of all 126 scales by squared error                          sweep.py
hessian        the best of all 126 scales by the error of the layer's output        hessian.py
admm           ``hessian``, then codes that make up for each other                  admm.py
gptq           scales and codes in sequence, errors fed forward, then descent       gptq.py
"""

from __future__ import annotations

import difflib
from typing import Any, Callable

import torch
from torch import Tensor

from . import admm, gptq, hessian, rtn, sweep
from .weight import BLOCK_SIZES, NEAREST_RANGE, SEARCH_RANGE, NVFP4Weight, global_scale_of

METHODS = ("rtn", "four_over_six", "sweep", "hessian", "admm", "gptq")
NEED_HESSIAN = ("hessian", "admm", "gptq")
_OPTIONS = {"admm": admm.Options, "gptq": gptq.Options}


def quantize_nvfp4(
    w: Tensor,
    method: str = "sweep",
    hessian: Tensor | None = None,
    *,
    block_size: int = 16,
    global_scale: Tensor | None = None,
    name: str = "weight",
    progress: bool = False,
    **options: Any,
) -> NVFP4Weight:
    """NVFP4 of an [N, K] matrix.

    ``hessian``: [K, K], ``mean(x x^T)`` over the layer's inputs, for the methods that weigh errors by it.
    ``global_scale``: instead of the matrix's own, where layers share one. ``name`` is the layer's, for errors.
    ``options`` are those of the method: ``damping``, ``order``, ``candidates``, ``paths``, ``passes``, ``steps`` of
    gptq; ``rounds``, ``rho``, ``last_rho``, ``sweep_every`` of admm.
    """
    check_method(method, hessian is not None, name)
    _check_weight(w, block_size, name)
    keywords: dict[str, Any] = _method_options(method, options)
    w = w.detach()
    if global_scale is None:
        global_scale = own_global_scale(w, method)
    else:
        global_scale = _checked_global_scale(global_scale, w, name)
    if method in NEED_HESSIAN:
        _check_hessian(hessian, w, name)
        assert hessian is not None, "check_method"
        keywords |= {"hessian": hessian.to(w.device), "progress": progress}
    if not w.numel():
        empty = torch.empty(w.shape[0], -(-w.shape[1] // block_size), dtype=torch.float8_e4m3fn, device=w.device)
        codes = torch.empty(w.shape[0], empty.shape[1] * block_size // 2, dtype=torch.uint8, device=w.device)
        return NVFP4Weight(codes, empty, global_scale, w.shape[1])
    codes, block_scales = _FUNCTIONS[method](w, global_scale, block_size=block_size, **keywords)
    return NVFP4Weight(codes, block_scales, global_scale, w.shape[1])


_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "rtn": rtn.quantize,
    "four_over_six": sweep.four_over_six,
    "sweep": sweep.quantize,
    "hessian": hessian.quantize,
    "admm": admm.quantize,
    "gptq": gptq.quantize,
}


def own_global_scale(w: Tensor, method: str) -> Tensor:
    """The global scale that a method gives a matrix of its own."""
    amax = w.abs().amax().to(torch.float32) if w.numel() else w.new_zeros((), dtype=torch.float32)
    return global_scale_of(amax, NEAREST_RANGE if method == "rtn" else SEARCH_RANGE)


def check_method(method: str, has_hessian: bool, name: str = "weight") -> None:
    if method not in METHODS:
        close = difflib.get_close_matches(str(method), METHODS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{name}: method={method!r} is unknown{hint}; expected one of: {', '.join(METHODS)}")
    if method in NEED_HESSIAN and not has_hessian:
        raise ValueError(
            f"{name}: method={method!r} weighs errors by the layer's inputs and got no hessian; give hessian=, or "
            "calibration=fp8_compile.calibrate(model, batches) to pack, or use method='sweep'"
        )


def _method_options(method: str, options: dict[str, Any]) -> dict[str, Any]:
    if not options:
        return {}
    known = list(getattr(_OPTIONS.get(method), "__dataclass_fields__", ()))
    unknown = [option for option in options if option not in known]
    if unknown:
        expected = ", ".join(known) or "none"
        raise ValueError(
            f"method={method!r} has no option {', '.join(map(repr, unknown))}; expected some of: {expected}"
        )
    return {"options": _OPTIONS[method](**options)}


def _check_weight(w: Tensor, block_size: int, name: str) -> None:
    if not isinstance(w, Tensor) or not w.is_floating_point() or w.dtype.itemsize < 2:
        got = w.dtype if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"{name}: NVFP4 expects a float32, bfloat16 or float16 matrix, got {got}")
    if w.dim() != 2:
        raise ValueError(f"{name}: NVFP4 expects a matrix [N, K], got shape {tuple(w.shape)}; reshape it first")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"{name}: block_size={block_size!r}; expected 16 (NVFP4) or 32")
    if w.numel() and not w.abs().amax().isfinite():
        bad = int((~w.isfinite()).sum())
        raise ValueError(
            f"{name}: {bad} of {w.numel()} weights are Inf or NaN, expected finite ones; repair the checkpoint, or "
            "exclude the layer"
        )
    if w.dtype == torch.float64 and w.numel() and w.abs().amax() > torch.finfo(torch.float32).max:
        raise ValueError(f"{name}: weights exceed FP32, the largest is {w.abs().amax().item():.3g}; scale them down")


def _check_hessian(hessian: Tensor | None, w: Tensor, name: str) -> None:
    assert hessian is not None
    k = w.shape[1]
    if tuple(hessian.shape) != (k, k):
        raise ValueError(f"{name}: hessian expects shape ({k}, {k}), K by K of the weight, got {tuple(hessian.shape)}")
    if not hessian.isfinite().all():
        raise ValueError(f"{name}: the Hessian has Inf or NaN; the layer's inputs overflowed while calibrating")


def _checked_global_scale(global_scale: Tensor, w: Tensor, name: str) -> Tensor:
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=w.device)
    if scale.numel() != 1 or not (scale > 0).all() or not scale.isfinite().all():
        raise ValueError(f"{name}: global_scale expects one finite number above 0, got {global_scale!r}")
    return scale.reshape(())
