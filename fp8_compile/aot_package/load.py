"""Load an exported package: ``fp8_compile.load("model.pt2")(*args)``."""

from __future__ import annotations

import os
from typing import Any

import torch

from fp8_compile.report import Report
from fp8_compile.torch_internals.packages import PackageLoader

from .inputs import check
from .manifest import Manifest, read_manifest


class LoadedModel:
    """A package, ready to be called as the model was: inference only, on the CPU.

    Its code is native: load packages of people you trust, as you would run their programs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.manifest: Manifest = read_manifest(path)
        try:
            self._loader = PackageLoader(path)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            again = "copy it again, or export the model again"
            raise ValueError(f"{path}: its code can't be loaded ({said}); {again}") from None
        if (taken := self._loader.inputs.num_leaves) != len(self.manifest.inputs):
            described = len(self.manifest.inputs)
            raise ValueError(
                f"{path}: its code takes {taken} inputs, its manifest describes {described}; export the model again"
            )

    @property
    def report(self) -> Report:
        """What became of each matmul."""
        return self.manifest.report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            flat, spec = self._loader.flatten(args, kwargs)
        except ValueError as error:
            raise ValueError(f"the package was exported with other keyword arguments: {error}") from None
        if spec != self._loader.inputs:
            raise ValueError(f"the package was exported for arguments like {self._loader.inputs}, got {spec}")
        check(flat, self.manifest.inputs, self.manifest.ranges)
        # The code was made for contiguous inputs, and would read others as if they were.
        tensors = [value.detach().contiguous() for value in flat if isinstance(value, torch.Tensor)]
        return self._loader.run(tensors)


def load(path: str | os.PathLike[str]) -> LoadedModel:
    """Load what ``fp8_compile.export`` wrote. Nothing is compiled or unpickled, and no code of the model is needed.

    A file that is damaged, foreign, of another version or for another machine is a ValueError that says what to do.
    """
    return LoadedModel(path)
