"""Files that take long to make, kept in Inductor's cache folder for the processes to come.

    <cache>/fp8_compile/kernels/<stem>_<hash of key><suffix>

A process loads what another one wrote, days ago perhaps. So each file ends with a seal, 32 bytes which linkers and
loaders ignore: SHA-256 of its name and of everything before the seal. A file that was cut, emptied or mixed up with
another one does not fit its seal, and is made again. (Loading it would end the process with SIGBUS, at best.) A folder
or file that another user owns or may write is never used: whoever writes it can run code as us.

``make`` works in a scratch folder, which it holds a lock on. A scratch folder that no one has locked belongs to a
process that was killed, and is removed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import stat
import tempfile
import time
from typing import Callable, Iterator

from fp8_compile.torch_internals import inductor

log = logging.getLogger("fp8_compile")

LONGEST_WAIT = 300  # seconds for another process that makes the same file
NEW, SCRATCH = "new_", "scratch_"  # folders of ours: not locked yet, and locked
LONGEST_NEW = 3600  # seconds after which a folder that was never locked is left over: it takes microseconds
_SEAL = hashlib.sha256().digest_size
_TRUSTED = 0  # root, who needs no file of ours to run code as us

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # set by Inductor where it was not
_ALONE = "Until then CPU kernels are compiled for this process alone, which takes seconds"

Make = Callable[[pathlib.Path], pathlib.Path]


class UnsafeError(OSError):
    """A file or folder that someone else may have written."""


def kept(stem: str, suffix: str, key: str, make: Make) -> pathlib.Path:
    """The file of that name, made where it is not there yet, or not whole.

    ``make(folder)`` writes it somewhere in an empty folder, from where the whole file is moved into place. Of several
    processes one makes it while the others wait. A cache that can't be used gives a file for this process alone, and
    a warning.
    """
    name = f"{stem}_{hashlib.sha256(key.encode()).hexdigest()[:32]}{suffix}"
    try:
        return _kept_in(cache_folder(), name, make)
    except UnsafeError as error:
        _warn(f"{error}. {_ALONE}")
    except OSError as error:
        _warn(
            f"the cache folder {os.environ.get(VARIABLE)} can't be used: expected a folder with room that can be "
            f"written, got {error}. Mend it, or set {VARIABLE} to another folder. {_ALONE}"
        )
    try:
        return _kept_in(_private_folder(os.getpid()), name, make)
    except OSError as error:
        raise RuntimeError(
            f"the compiled CPU kernels can't be stored: expected a folder with room for some megabytes, got {error}. "
            "Make room there, or set TMPDIR to another folder"
        ) from error


def cache_folder() -> pathlib.Path:
    """Where files are kept; not made yet, perhaps."""
    return pathlib.Path(inductor.cache_folder()) / "fp8_compile" / "kernels"


def _kept_in(folder: pathlib.Path, name: str, make: Make) -> pathlib.Path:
    path = folder / name
    if _is_whole(path):
        return path
    _make_private(folder)
    with _one_process_at_a_time(folder / f"{name}.lock"):
        if not _is_whole(path):
            _remove_left_over(folder)
            with _scratch(folder) as scratch:
                _put(make(scratch), path)
    return path


def _is_whole(path: pathlib.Path) -> bool:
    """True if the file exists and fits its seal; an error if others may have written it."""
    try:
        _check_owner(path.parent, stat.S_ISDIR, "a folder")
        _check_owner(path, stat.S_ISREG, "a file")
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    if content[-_SEAL:] == _seal(path.name, content[:-_SEAL]):
        return True
    log.warning("%s is damaged (%d bytes that do not fit their seal), and is made again", path, len(content))
    return False


def _seal(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _check_owner(path: pathlib.Path, is_kind: Callable[[int], bool], kind: str) -> None:
    found = os.lstat(path)
    if not is_kind(found.st_mode):
        got = "a link" if stat.S_ISLNK(found.st_mode) else "a folder" if stat.S_ISDIR(found.st_mode) else "a file"
    elif found.st_uid not in (os.geteuid(), _TRUSTED):
        got = f"one that user {found.st_uid} owns"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        got = f"one that others may write (mode {stat.S_IMODE(found.st_mode):03o})"
    else:
        return
    raise UnsafeError(
        f"{path} is not used: expected {kind} of user {os.geteuid()} that no one else may write, got {got}. Remove it, "
        f"or set {VARIABLE} to another folder"
    )


@functools.cache
def _warn(message: str) -> None:
    """Once for each message."""
    log.warning("%s", message)


@functools.cache
def _private_folder(process: int) -> pathlib.Path:
    """A folder of this process, removed at its end."""
    folder = tempfile.mkdtemp(prefix="fp8_compile_")

    def remove() -> None:
        if os.getpid() == process:  # and not a child of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return pathlib.Path(folder)


def _make_private(folder: pathlib.Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    _check_owner(folder, stat.S_ISDIR, "a folder")


@contextlib.contextmanager
def _one_process_at_a_time(file: pathlib.Path) -> Iterator[None]:
    """Hold an inter-process lock. If it can't be created, or its holder times out, go on without it: each process then
    makes the file for itself."""
    lock = inductor.file_lock(str(file), LONGEST_WAIT)
    try:
        lock.acquire()
    except (OSError, NotImplementedError):  # a timeout is an OSError, too
        yield
        return
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder, locked for as long as this process lives; it has its name only once it is locked."""
    new = pathlib.Path(tempfile.mkdtemp(prefix=NEW, dir=folder))
    locked = _locked(new)
    scratch = new if locked is None else new.rename(new.with_name(SCRATCH + new.name.removeprefix(NEW)))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if locked is not None:
            os.close(locked)


def _locked(folder: pathlib.Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None where someone else has it, or folders can't
    be locked, as on some network file systems."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_left_over(folder: pathlib.Path) -> None:
    for left in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may be removing it
            if left.name.startswith(SCRATCH) and (locked := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(locked)
            elif left.name.startswith(NEW) and left.stat().st_mtime < time.time() - LONGEST_NEW:
                shutil.rmtree(left, ignore_errors=True)


def _put(made: pathlib.Path, path: pathlib.Path) -> None:
    """Seal the file and move it into place. It is on the disk before its name is: a machine that stops in between has
    no file, rather than an empty one."""
    seal = _seal(path.name, made.read_bytes())
    with made.open("ab") as file:
        file.write(seal)
        file.flush()
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        os.fsync(file.fileno())
    os.replace(made, path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
