"""FP8 training and 4-bit inference for PyTorch models, as a ``torch.compile`` backend.

What is named here is imported when it is first asked for: Dynamo and Inductor take seconds, which a process that only
loads a package (``fp8_compile.load``) need not spend.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .torch_internals import onednn as _onednn

_onednn.guard()  # before anything that could multiply matrices

# Operations that an exported program may have: it can be loaded once they are known.
from .import_hooks import when_imported as _when_imported  # noqa: E402
from .kernels import fp8_cache as _fp8_cache  # noqa: E402, F401
from .kernels import fp8_inputs as _fp8_inputs  # noqa: E402, F401
from .kernels import fp8_weight as _fp8_weight  # noqa: E402, F401
from .kernels.cpu import scaled_mm as _scaled_mm  # noqa: E402, F401
from .kernels.nvfp4 import ops as _ops  # noqa: E402, F401


def _register_adapters() -> None:
    importlib.import_module(".packing.adapters", __name__).register()


_when_imported("peft", _register_adapters)

if TYPE_CHECKING:
    from .aot_package.export import export
    from .aot_package.load import LoadedModel, load
    from .backend.entry_point import Backend
    from .backend.explain import explain
    from .config import Config
    from .kernels.nvfp4.quantize import quantize_nvfp4
    from .kernels.nvfp4.weight import NVFP4Weight
    from .packing.adapters import merge_adapters
    from .packing.calibrate import calibrate
    from .packing.calibration import Calibration
    from .packing.checkpoints.folder import pack_folder
    from .packing.checkpoints.pretrained import PackConfig
    from .packing.checkpoints.save_and_load import load_checkpoint, save_checkpoint
    from .packing.fp8_cache import Fp8Cache
    from .packing.pack import pack
    from .packing.pack_report import PackReport
    from .packing.packed_linear import PackedLinear
    from .packing.shardable import shardable
    from .packing.update import update_packed
    from .report import Report
    from .scaling.find_state import scaling_state
    from .scaling.frozen_scales import freeze_scales
    from .scaling.precision import set_precision
    from .scaling.state import ScalingState
    from .target import Target
    from .training.attach import Training, attach
    from .training.loss_scaler import LossScaler
    from .training.master_weights import MasterWeights

__all__ = [
    "Backend",
    "Calibration",
    "Config",
    "Fp8Cache",
    "LoadedModel",
    "LossScaler",
    "MasterWeights",
    "NVFP4Weight",
    "PackConfig",
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
    "merge_adapters",
    "pack",
    "pack_folder",
    "quantize_nvfp4",
    "save_checkpoint",
    "scaling_state",
    "set_precision",
    "shardable",
    "update_packed",
]
__version__ = "0.2.0"

_HOMES = {
    "Backend": "backend.entry_point",
    "Calibration": "packing.calibration",
    "Config": "config",
    "Fp8Cache": "packing.fp8_cache",
    "LoadedModel": "aot_package.load",
    "LossScaler": "training.loss_scaler",
    "MasterWeights": "training.master_weights",
    "NVFP4Weight": "kernels.nvfp4.weight",
    "PackConfig": "packing.checkpoints.pretrained",
    "PackReport": "packing.pack_report",
    "PackedLinear": "packing.packed_linear",
    "Report": "report",
    "ScalingState": "scaling.state",
    "Target": "target",
    "Training": "training.attach",
    "attach": "training.attach",
    "calibrate": "packing.calibrate",
    "explain": "backend.explain",
    "export": "aot_package.export",
    "freeze_scales": "scaling.frozen_scales",
    "load": "aot_package.load",
    "load_checkpoint": "packing.checkpoints.save_and_load",
    "merge_adapters": "packing.adapters",
    "pack": "packing.pack",
    "pack_folder": "packing.checkpoints.folder",
    "quantize_nvfp4": "kernels.nvfp4.quantize",
    "save_checkpoint": "packing.checkpoints.save_and_load",
    "scaling_state": "scaling.find_state",
    "set_precision": "scaling.precision",
    "shardable": "packing.shardable",
    "update_packed": "packing.update",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
