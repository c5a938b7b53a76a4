"""FP8 training and 4-bit inference for PyTorch models, as a ``torch.compile`` backend.

What is named here is imported when it is first asked for: Dynamo and Inductor take seconds, which a process that only
loads a package (``fp8_compile.load``) need not spend.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from . import onednn as _onednn

_onednn.guard()  # before anything that could multiply matrices

# Operations that an exported program may have: it can be loaded once they are known.
from .kernels import fp8_inputs as _fp8_inputs  # noqa: E402, F401
from .kernels import fp8_weight as _fp8_weight  # noqa: E402, F401
from .kernels.cpu import scaled_mm as _scaled_mm  # noqa: E402, F401
from .kernels.nvfp4 import ops as _ops  # noqa: E402, F401

if TYPE_CHECKING:
    from .attach import Training, attach
    from .backend import Backend
    from .calibrate import calibrate
    from .calibration import Calibration
    from .checkpoint import load_checkpoint, save_checkpoint
    from .config import Config
    from .explain import explain
    from .export import export
    from .frozen_scales import freeze_scales
    from .kernels.nvfp4.quantize import quantize_nvfp4
    from .kernels.nvfp4.weight import NVFP4Weight
    from .load import LoadedModel, load
    from .loss_scaler import LossScaler
    from .master_weights import MasterWeights
    from .pack import pack
    from .pack_folder import pack_folder
    from .pack_report import PackReport
    from .packed_linear import PackedLinear
    from .report import Report
    from .scaling_state import ScalingState, scaling_state
    from .target import Target

__all__ = [
    "Backend",
    "Calibration",
    "Config",
    "LoadedModel",
    "LossScaler",
    "MasterWeights",
    "NVFP4Weight",
    "PackReport",
    "PackedLinear",
    "Report",
    "ScalingState",
    "Target",
    "Training",
    "attach",
    "calibrate",
    "explain",
    "export",
    "freeze_scales",
    "load",
    "load_checkpoint",
    "pack",
    "pack_folder",
    "quantize_nvfp4",
    "save_checkpoint",
    "scaling_state",
]
__version__ = "0.1.0"

_HOMES = {
    "Backend": "backend",
    "Calibration": "calibration",
    "Config": "config",
    "LoadedModel": "load",
    "LossScaler": "loss_scaler",
    "MasterWeights": "master_weights",
    "NVFP4Weight": "kernels.nvfp4.weight",
    "PackReport": "pack_report",
    "PackedLinear": "packed_linear",
    "Report": "report",
    "ScalingState": "scaling_state",
    "Target": "target",
    "Training": "attach",
    "attach": "attach",
    "calibrate": "calibrate",
    "explain": "explain",
    "export": "export",
    "freeze_scales": "frozen_scales",
    "load": "load",
    "load_checkpoint": "checkpoint",
    "pack": "pack",
    "pack_folder": "pack_folder",
    "quantize_nvfp4": "kernels.nvfp4.quantize",
    "save_checkpoint": "checkpoint",
    "scaling_state": "scaling_state",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _FrontDoor(types.ModuleType):
    """``fp8_compile.export`` is the function, whoever has imported the module of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor
