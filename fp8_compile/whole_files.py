"""Files that are there whole or not at all: written beside their name, moved into place when they are complete.

This module imports nothing of ours, so that every room may use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import threading
from typing import Any, BinaryIO, Iterator

PART = ".part"


@contextlib.contextmanager
def written_beside(path: pathlib.Path, *, sync: bool = True, own_part: bool = False) -> Iterator[pathlib.Path]:
    """A path to write to, ``.NAME.part``; what is there gets its name when the block ends well, and is removed if not.

    ``sync``: it is on the disk before it has its name, so that a machine which stops in between leaves no empty file.
    ``own_part``: other processes and threads may write the same file, so that each needs a part of its own.
    """
    own = f".{os.getpid()}.{threading.get_ident()}" if own_part else ""
    part = path.with_name(f".{path.name}{own}{PART}")
    try:
        yield part
        _move(part, path, sync)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextlib.contextmanager
def written_in_scratch(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The same for a file whose contents depend on its name: a path of that name, in a folder beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield scratch / path.name
        _move(scratch / path.name, path, sync=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path) as part, open(part, "wb") as file:
        yield file


def write_json(path: pathlib.Path, data: Any) -> None:
    with whole_file(path) as file:
        file.write((json.dumps(data, indent=2) + "\n").encode())


def _move(part: pathlib.Path, path: pathlib.Path, sync: bool) -> None:
    if sync:
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    os.replace(part, path)
