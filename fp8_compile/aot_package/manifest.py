"""The manifest of an exported package: what it is, what it needs, what was done to the model.

A package is a ``.pt2`` archive of torch's; the manifest is one JSON file in it, which ``read_manifest`` checks before
anything else is looked at. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
from typing import Any, Mapping

import torch

from fp8_compile.json_files import parse_json
from fp8_compile.kernels.cpu.isa import cpu_features
from fp8_compile.report import Report

from .archive import MANIFEST, read_manifest_text
from .inputs import check_described

FORMAT = 1  # of the manifest and of what it promises
FILE = MANIFEST
_TEXT = (str,)
_TYPES: dict[str, tuple[type, ...]] = {  # of the manifest's fields in JSON
    "torch": _TEXT,
    "fp8_compile": _TEXT,
    "system": _TEXT,
    "machine": _TEXT,
    "cpu_features": (list,),
    "weights": (str, type(None)),
    "options": (dict,),
    "report": (dict,),
    "inputs": (list,),
    "ranges": (dict,),
    "calibration": (dict, type(None)),
    "format": (int,),
}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``report`` has one row per matmul; ``inputs`` and ``ranges`` are those of ``inputs.py``."""

    torch: str
    fp8_compile: str
    system: str
    machine: str
    cpu_features: tuple[str, ...]
    weights: str | None
    options: Mapping[str, Any]
    report: Report
    inputs: tuple[Mapping[str, Any], ...]
    ranges: Mapping[str, Any]
    calibration: Mapping[str, Any] | None = None
    format: int = FORMAT

    def to_json(self) -> str:
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**data, "report": self.report.to_dict()}, indent=1, default=str)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Manifest:
        """A manifest from its JSON; a ValueError where something is missing or of another type."""
        for name, types in _TYPES.items():
            if name not in data:
                raise ValueError(f"it has no {name!r}")
            if not isinstance(data[name], types) or isinstance(data[name], bool):
                expected = " or ".join("null" if one is type(None) else one.__name__ for one in types)
                raise ValueError(f"{name!r} is {type(data[name]).__name__}; expected {expected}")
        if not all(isinstance(feature, str) for feature in data["cpu_features"]):
            raise ValueError("'cpu_features' has something that is not text")
        check_described(data["inputs"], data["ranges"])
        values: dict[str, Any] = {name: tuple(data[name]) if _TYPES[name] == (list,) else data[name] for name in _TYPES}
        return cls(**{**values, "report": Report.from_dict(data["report"])})


def here() -> dict[str, Any]:
    """What this machine and these versions are, in the manifest's words."""
    from fp8_compile import __version__

    return {
        "torch": torch.__version__.partition("+")[0],
        "fp8_compile": __version__,
        "system": platform.system(),
        "machine": platform.machine(),
    }


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a package that is whole and that this machine can run; otherwise an error with the remedy."""
    path = pathlib.Path(path)
    data = parse_json(read_manifest_text(path), f"{path}: its manifest", "Export the model again")
    version = data.get("format")
    if version != FORMAT or isinstance(version, bool):
        newer = isinstance(version, int) and version > FORMAT
        upgrade = f"upgrade fp8_compile (it was written by {data.get('fp8_compile', 'a newer one')})"
        raise ValueError(
            f"{path}: the package has format {version!r}, this fp8_compile reads format {FORMAT}; "
            f"{upgrade if newer else 'export the model again'}"
        )
    try:
        manifest = Manifest.from_data(data)
    except ValueError as error:
        raise ValueError(
            f"{path}: its manifest is not one that export writes: {error}; export the model again"
        ) from None
    _check_machine(path, manifest)
    return manifest


def _check_machine(path: pathlib.Path, manifest: Manifest) -> None:
    now = here()
    for field in ("system", "machine"):
        if getattr(manifest, field) != now[field]:
            raise ValueError(
                f"{path}: exported for {manifest.system} on {manifest.machine}, this is {now['system']} on "
                f"{now['machine']}; export the model on such a machine"
            )
    if manifest.torch.split(".")[:2] != now["torch"].split(".")[:2]:
        raise ValueError(
            f"{path}: exported with torch {manifest.torch}, this is torch {now['torch']}; export the model again with "
            f"it, or install torch {'.'.join(manifest.torch.split('.')[:2])}"
        )
    missing = set(manifest.cpu_features) - cpu_features()
    if missing:
        raise ValueError(
            f"{path}: this CPU lacks {', '.join(sorted(missing))}, which the package's code uses; "
            "export the model on this machine, or on one with the same kind of CPU"
        )
