"""The scaling state in a checkpoint of ``torch.distributed.checkpoint``.

    dcp.save({"model": ..., "scaling": fp8_compile.scaling_state(model).state_dict()}, checkpoint_id=folder)
    load_scaling_state(model, folder)

The state is the same on all ranks and goes by slots, so it fits any number of them. Saving takes no more than the line
above. ``dcp.load`` fills tensors that are there already, and a model that has not run yet has no slots: hence this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .find_state import scaling_state


def _metadata(reader: Any, checkpoint_id: Any) -> Any:
    """What the checkpoint says it holds; it is written last, so that one that was cut short has none."""
    try:
        return reader.read_metadata()
    except FileNotFoundError:
        raise ValueError(
            f"the checkpoint {checkpoint_id} has no .metadata: it was cut short, or is no checkpoint; expected one "
            "that dcp.save has finished"
        ) from None


def load_scaling_state(model: Any, checkpoint_id: Any, *, key: str = "scaling", storage_reader: Any = None) -> None:
    """Give a model, run or not, the scaling state that a checkpoint has under ``key``. All ranks call it."""
    reader = storage_reader or dcp.FileSystemReader(checkpoint_id)
    metadata = _metadata(reader, checkpoint_id)
    paths = metadata.planner_data or {}
    saved: dict[str, Tensor] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = paths.get(name, ())
        if len(path) == 2 and path[0] == key and isinstance(stored, TensorStorageMetadata):
            saved[path[1]] = torch.empty(stored.size, dtype=stored.properties.dtype)
    if not saved:
        tops = sorted({str(path[0]) for path in paths.values()})
        raise ValueError(
            f"the checkpoint {checkpoint_id} has no scaling state under {key!r}; it has {', '.join(tops)}. Expected "
            f"one saved by dcp.save({{..., {key!r}: fp8_compile.scaling_state(model).state_dict()}})"
        )
    dcp.load({key: saved}, checkpoint_id=checkpoint_id, storage_reader=reader)
    scaling_state(model).load_state_dict(saved)
