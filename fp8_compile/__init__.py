"""FP8 training and 4-bit inference for PyTorch models, as a ``torch.compile`` backend."""

from . import onednn as _onednn

_onednn.guard()

from .attach import Training, attach  # noqa: E402  (the guard must come before anything that could multiply matrices)
from .backend import Backend  # noqa: E402
from .calibrate import calibrate  # noqa: E402
from .calibration import Calibration  # noqa: E402
from .checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from .config import Config  # noqa: E402
from .explain import explain  # noqa: E402
from .export import export  # noqa: E402
from .kernels.nvfp4.quantize import quantize_nvfp4  # noqa: E402
from .kernels.nvfp4.weight import NVFP4Weight  # noqa: E402
from .load import LoadedModel, load  # noqa: E402
from .loss_scaler import LossScaler  # noqa: E402
from .master_weights import MasterWeights  # noqa: E402
from .pack import pack  # noqa: E402
from .pack_folder import pack_folder  # noqa: E402
from .pack_report import PackReport  # noqa: E402
from .packed_linear import PackedLinear  # noqa: E402
from .report import Report  # noqa: E402
from .scaling_state import ScalingState, scaling_state  # noqa: E402
from .target import Target  # noqa: E402

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
    "load",
    "load_checkpoint",
    "pack",
    "pack_folder",
    "quantize_nvfp4",
    "save_checkpoint",
    "scaling_state",
]
__version__ = "0.1.0"
