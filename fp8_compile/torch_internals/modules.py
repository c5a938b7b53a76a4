"""What torch wraps around modules and tensors: ``torch.compile``, data parallelism, FSDP, distributed tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

WRAPPED = "_orig_mod"  # where torch.compile keeps the module; also a component of the names of what is inside
NORMS_AND_CONVOLUTIONS = (_NormBase, _ConvNd)  # batch and instance norms, and convolutions of every kind


def unwrap(model: Any) -> Any:
    """The user's module inside what ``torch.compile``, ``DistributedDataParallel`` and ``DataParallel`` put around it,
    in whatever order. What is not wrapped comes back as it is."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif (inner := getattr(model, WRAPPED, None)) is not None:
            model = inner
        else:
            return model


def is_compiled(module: nn.Module) -> bool:
    """True if ``torch.compile`` was called on the module, or its own ``compile()``."""
    return WRAPPED in module._modules or compiled_in_place(module)


def compiled_in_place(module: nn.Module) -> bool:
    """True if the module's own ``compile()`` was called."""
    return module._compiled_call_impl is not None


def unwrapped_by_lightning(module: nn.Module) -> bool:
    """True if Lightning took the wrapper of ``torch.compile`` off the module; it notes that there was one."""
    return getattr(module, "_compiler_ctx", None) is not None


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that is on this rank: all of it, unless it is a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Tensor | None) -> bool:
    """True for a DTensor, of which a rank has a part."""
    return hasattr(tensor, "_local_tensor")


def whole_of(tensor: Any) -> Tensor:
    """A tensor as one process would have it. Of a DTensor it is gathered: all ranks have to ask for it."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def like_local(tensor: Any, local: Tensor) -> Tensor:
    """``tensor`` with another part on this rank, of the same shape."""
    if not is_sharded(tensor):
        return local
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    made: Tensor = type(tensor).from_local(local, tensor.device_mesh, tensor.placements, run_check=False, **shape)
    return made


def gathered_by_fsdp() -> set[int]:
    """Identities of the parameters that FSDP2 gathers for a while, on every rank."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed._composable_state import _module_state_mapping

    found: set[int] = set()
    for reference in _module_state_mapping.values():
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            gathered = (getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params)
            found.update(id(parameter) for parameter in gathered if parameter is not None)
    return found
