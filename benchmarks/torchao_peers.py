"""torchao's Linears for training, for ``AbsentGpu.training_step(convert=...)``.

    float8("tensorwise")   as ``convert_to_float8_training`` swaps them in
    mxfp8                  its MXFP8: scales rounded up, the three gemms of ``mx_mm``

torchao decides while it is imported which of its kernels there are. For FP8 it must be imported before there is an
absent GPU, since it would believe in that GPU for good. Its casts to MXFP8 exist only where there was a B200 at that
time: they are imported with the absent one, by a process that has not imported them before. They are the Triton ones
for both directions; the CUDA extension that it prefers for columns, and that moves the same bytes, is not in a build
for CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
from typing import Callable

import torch
from torch import nn

KERNELS = "torchao.prototype.mx_formats.kernels"


def float8(recipe: str) -> Callable[[nn.Module], nn.Module]:
    """A ``convert`` that swaps the Linears for torchao's."""
    # On the CPU the import says twice that a library of CUDA kernels failed to load.
    with _quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    return functools.partial(convert_to_float8_training, config=Float8LinearConfig.from_recipe_name(recipe))


def mxfp8(model: nn.Module) -> nn.Module:
    """The model with torchao's MXFP8 in the place of its Linears."""
    with _quiet():
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats import config
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    if not sys.modules[KERNELS]._triton_kernels_available:
        raise RuntimeError(
            "torchao's MXFP8 was imported while there was no B200, not even an absent one: it has no kernels in this "
            "process. Ask for it in a process of its own"
        )
    e4m3 = torch.float8_e4m3fn
    casts = config.MXFP8Dim0CastKernelChoice.TRITON, config.MXFP8Dim1CastKernelChoice.TRITON
    options = (e4m3, e4m3, e4m3, 32, KernelPreference.AUTO, *casts, config.ScaleCalculationMode.RCEIL, False)

    class Linear(nn.Module):
        def __init__(self, original: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = original.weight, original.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = mx_mm.apply(x, self.weight, *options)
            return y if self.bias is None else y + self.bias

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, Linear(child))
    return model


@contextlib.contextmanager
def _quiet():
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
    logging.disable(logging.NOTSET)
