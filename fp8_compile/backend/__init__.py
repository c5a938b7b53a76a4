"""A Dynamo graph becomes FP8 code. The entry point that torch finds for ``backend="fp8"`` is :func:`fp8`."""

from .entry_point import Backend, fp8

__all__ = ["Backend", "fp8"]
