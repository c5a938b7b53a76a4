"""Packages that AOTInductor writes and libtorch loads."""

from __future__ import annotations

import os
from typing import Any, Mapping

import torch
from torch.utils import _pytree as pytree


def write_package(path: str | os.PathLike[str], files: list[Any], extra_files: Mapping[str, str]) -> None:
    from torch.export.pt2_archive._package import package_pt2

    package_pt2(os.fspath(path), aoti_files=files, extra_files=dict(extra_files))


class PackageLoader:
    """The code of a package, loaded by libtorch alone: torch's own ``load_package`` would look for exported programs
    too, and unpickle what comes with them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._loader = torch._C._aoti.AOTIModelPackageLoader(os.fspath(path), "model", False, 1, -1)
        self.inputs, self._outputs = map(pytree.treespec_loads, self._loader.get_call_spec())

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        """Arguments as a list, and how they were nested. ValueError: other keyword arguments than at export."""
        from torch.export._tree_utils import reorder_kwargs

        return pytree.tree_flatten((args, reorder_kwargs(kwargs, self.inputs)))

    def run(self, tensors: list[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(self._loader.boxed_run(tensors), self._outputs)
