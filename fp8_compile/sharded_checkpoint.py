"""Moved to :mod:`fp8_compile.scaling.distributed_checkpoint`. This path still works, for code that imports it."""

from .scaling.distributed_checkpoint import load_scaling_state

__all__ = ["load_scaling_state"]
