"""The zip archive that a package is: what is in it is checked before any of it is read or run.

``export`` stores files as they are and compresses none, so that what an archive says it holds can't be more than its
own size: a small file that unpacks to gigabytes is refused by its headers.
"""

from __future__ import annotations

import pathlib
import struct
import zipfile
import zlib

MANIFEST = "fp8_compile.json"
MOST_MANIFEST = 32 * 2**20  # bytes; a row per matmul takes some hundreds
MOST_FILES = 10_000
AGAIN = "copy it again, or export the model again"
_INSIDE = f"/extra/{MANIFEST}"  # after the archive's own folder; where torch's reader looks for extra files
_CODE = "data/aotinductor/model/"
_FOLDERS = (_CODE, "extra/", ".data/")
_FILES = ("archive_format", "archive_version", "byteorder", "version")
_ENCRYPTED = 1  # bit of a file's flags
# What zipfile gives for headers that make no sense, besides the first, which is its own.
_DAMAGE = (
    zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError, OSError, struct.error,
    zlib.error, LookupError,
)  # fmt: skip


def read_manifest_text(path: pathlib.Path) -> bytes:
    """The manifest of a package; an error unless all its files are whole and such as export writes."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; fp8_compile.export writes packages")
    with open(path, "rb") as file:  # a file that may not be read is the system's own error
        try:
            archive = zipfile.ZipFile(file)
            entries = archive.infolist()
        except _DAMAGE as error:
            raise _damaged(path, error) from None
        manifest = _checked(path, entries, path.stat().st_size)
        try:
            damaged = archive.testzip()
            text = archive.read(manifest) if damaged is None else b""
        except _DAMAGE as error:
            raise _damaged(path, error) from None
    if damaged is not None:
        raise ValueError(f"{path}: {damaged} is damaged; copy the package again, or export the model again")
    return text


def _checked(path: pathlib.Path, entries: list[zipfile.ZipInfo], size: int) -> zipfile.ZipInfo:
    """The entry of the manifest; an error if the headers say anything that export would not write."""
    found = [entry for entry in entries if entry.filename.endswith(_INSIDE)]
    if len(found) != 1:
        count = "no" if not found else "more than one"
        raise ValueError(
            f"{path}: not a package of fp8_compile.export (it has {count} {MANIFEST}); "
            "torch._inductor.aoti_load_package and torch.export.load read others"
        )
    _check_sizes(path, entries, size)
    if found[0].file_size > MOST_MANIFEST:
        raise ValueError(
            f"{path}: its {MANIFEST} has {found[0].file_size:,} bytes; expected at most {MOST_MANIFEST:,}: {AGAIN}"
        )
    root = found[0].filename.removesuffix(_INSIDE)
    _check_names(path, root, [entry.filename for entry in entries])
    return found[0]


def _check_sizes(path: pathlib.Path, entries: list[zipfile.ZipInfo], size: int) -> None:
    for entry in entries:
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
        if not stored or entry.flag_bits & _ENCRYPTED:
            raise ValueError(
                f"{path}: {entry.filename} is compressed or encrypted, {entry.compress_size:,} bytes for "
                f"{entry.file_size:,}; a package of fp8_compile.export is not: export the model again"
            )
    total = sum(entry.file_size for entry in entries)
    if total > size or len(entries) > MOST_FILES:
        raise ValueError(
            f"{path}: damaged, says that it holds {len(entries):,} files of {total:,} bytes in {size:,} bytes; {AGAIN}"
        )


def _check_names(path: pathlib.Path, root: str, names: list[str]) -> None:
    """Raise unless the files are what export writes: one library, no program that torch would unpickle, nothing twice,
    no name that leaves the folder it is put in."""
    for name in names:
        inner = name.removeprefix(f"{root}/")
        known = inner.startswith(_FOLDERS) or inner in _FILES
        if not name.startswith(f"{root}/") or not known or ".." in pathlib.PurePosixPath(inner).parts:
            raise ValueError(
                f"{path}: {name} does not belong in a package of fp8_compile.export; export the model again"
            )
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ValueError(f"{path}: {twice} is in it twice; {AGAIN}")
    libraries = [name for name in names if name.startswith(f"{root}/{_CODE}") and name.endswith(".so")]
    if len(libraries) != 1:
        raise ValueError(
            f"{path}: expected one library of code (.so) in {root}/{_CODE}, got {len(libraries) or 'none'}; {AGAIN}"
        )


def _damaged(path: pathlib.Path, error: BaseException) -> ValueError:
    said = str(error) or type(error).__name__
    return ValueError(f"{path}: not a package, or cut short or damaged ({said}); {AGAIN}")
