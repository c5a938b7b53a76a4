"""FP8 training and 4-bit inference for PyTorch models, as a ``torch.compile`` backend."""

from . import onednn as _onednn

_onednn.guard()

from .attach import Training, attach  # noqa: E402  (the guard must come before anything that could multiply matrices)
from .backend import Backend  # noqa: E402
from .config import Config  # noqa: E402
from .explain import explain  # noqa: E402
from .loss_scaler import LossScaler  # noqa: E402
from .master_weights import MasterWeights  # noqa: E402
from .report import Report  # noqa: E402
from .scaling_state import ScalingState, scaling_state  # noqa: E402
from .target import Target  # noqa: E402

__all__ = [
    "Backend",
    "Config",
    "LossScaler",
    "MasterWeights",
    "Report",
    "ScalingState",
    "Target",
    "Training",
    "attach",
    "explain",
    "scaling_state",
]
__version__ = "0.1.0"
