"""Load an exported package: ``fp8_compile.load("model.pt2")(*args)``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from .package_inputs import check
from .package_manifest import Manifest, read_manifest
from .report import Report


class LoadedModel:
    """A package, ready to be called as the model was: inference only, on the CPU.

    Its code is native: load packages of people you trust, as you would run their programs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.manifest: Manifest = read_manifest(path)
        try:
            # torch's own load_package would look for exported programs too, and unpickle what comes with them.
            self._loader = torch._C._aoti.AOTIModelPackageLoader(os.fspath(path), "model", False, 1, -1)
            self._inputs, self._outputs = map(pytree.treespec_loads, self._loader.get_call_spec())
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            again = "copy it again, or export the model again"
            raise ValueError(f"{path}: its code can't be loaded ({said}); {again}") from None
        if (taken := self._inputs.num_leaves) != len(self.manifest.inputs):
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
            ordered = reorder_kwargs(kwargs, self._inputs)
            flat, spec = pytree.tree_flatten((args, ordered))
        except ValueError as error:
            raise ValueError(f"the package was exported with other keyword arguments: {error}") from None
        if spec != self._inputs:
            raise ValueError(f"the package was exported for arguments like {self._inputs}, got {spec}")
        check(flat, self.manifest.inputs, self.manifest.ranges)
        # The code was made for contiguous inputs, and would read others as if they were.
        tensors = [value.detach().contiguous() for value in flat if isinstance(value, torch.Tensor)]
        return pytree.tree_unflatten(self._loader.boxed_run(tensors), self._outputs)


def load(path: str | os.PathLike[str]) -> LoadedModel:
    """Load what ``fp8_compile.export`` wrote. Nothing is compiled or unpickled, and no code of the model is needed.

    A file that is damaged, foreign, of another version or for another machine is a ValueError that says what to do.
    """
    return LoadedModel(path)
