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
import zipfile
from typing import Any, Mapping

import torch

from fp8_compile.kernels.cpu.isa import cpu_features

from .report import Report

FORMAT = 1  # of the manifest and of what it promises
FILE = "fp8_compile.json"
_INSIDE = f"/extra/{FILE}"  # behind the archive's own folder; where torch's reader looks for extra files
_FOLDERS = ("data/aotinductor/model/", "extra/", ".data/")
_FILES = ("archive_format", "archive_version", "byteorder", "version")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``report`` has a row a matmul; ``inputs`` and ``ranges`` are those of ``package_inputs``."""

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
    def from_json(cls, text: str) -> Manifest:
        data = json.loads(text)
        fields = {field.name for field in dataclasses.fields(cls)}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**{**{name: values[name] for name in fields}, "report": Report.from_dict(data["report"])})


def here() -> dict[str, Any]:
    """What this machine and these versions are, in the manifest's words."""
    from . import __version__

    return {
        "torch": torch.__version__.partition("+")[0],
        "fp8_compile": __version__,
        "system": platform.system(),
        "machine": platform.machine(),
    }


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a package that is whole and that this machine can run; otherwise an error with the remedy."""
    path = pathlib.Path(path)
    text = _manifest_text(path)
    try:
        data = json.loads(text)
        version = data["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: its manifest can't be read ({error!r}); export the model again") from None
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        upgrade = f"upgrade fp8_compile (it was written by {data.get('fp8_compile', 'a newer one')})"
        raise ValueError(
            f"{path}: the package has format {version!r}, this fp8_compile reads format {FORMAT}; "
            f"{upgrade if newer else 'export the model again'}"
        )
    try:
        manifest = Manifest.from_json(text)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: its manifest lacks something ({error!r}); export the model again") from None
    _check_machine(path, manifest)
    return manifest


def _manifest_text(path: pathlib.Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; fp8_compile.export writes packages")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            found = [name for name in names if name.endswith(_INSIDE)]
            if len(found) != 1:
                raise ValueError(
                    f"{path}: not a package of fp8_compile.export (it has no {FILE}); "
                    "torch._inductor.aoti_load_package and torch.export.load read others"
                )
            root = found[0].removesuffix(_INSIDE)
            _check_names(path, root, names)
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"{path}: {damaged} is damaged; copy the package again, or export the model again")
            return archive.read(found[0]).decode()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: not a package, or cut short or damaged ({error}); copy it again, or export the model again"
        ) from None


def _check_names(path: pathlib.Path, root: str, names: list[str]) -> None:
    """Only what export writes: no program that torch would unpickle, no name that leaves the folder it is put in."""
    for name in names:
        inner = name.removeprefix(f"{root}/")
        known = inner.startswith(_FOLDERS) or inner in _FILES
        if not name.startswith(f"{root}/") or not known or ".." in pathlib.PurePosixPath(inner).parts:
            raise ValueError(
                f"{path}: {name} does not belong in a package of fp8_compile.export; export the model again"
            )


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
