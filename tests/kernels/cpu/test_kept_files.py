"""Files kept for later processes: whole or not there, ours alone, whatever happened to the process that made them."""

from __future__ import annotations

import atexit
import errno
import os
import pathlib
import signal
import stat
import subprocess
import tempfile
import threading
import time
from typing import Callable, Iterator

import pytest
from instruction_sets import kernels_for
from torch.utils._filelock import FileLock

from fp8_compile.kernels.cpu import isa, kept_files, library

STRANGER = 12345  # a user who is not us
SOON = 20  # seconds in which a process has got to where we wait for it


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(kept_files.VARIABLE, str(tmp_path / "cache"))
    kept_files._warn.cache_clear()
    kept_files._private_folder.cache_clear()
    return tmp_path / "cache" / "fp8_compile" / "kernels"


@pytest.fixture(scope="session")
def compiled() -> str:
    """The quickest library to compile, once for all tests: in a cache that no test changes."""
    return kernels_for("portable")._name


@pytest.fixture
def compiler(compiled: str, tmp_path: pathlib.Path) -> str:
    """A compiler that gives the library that was compiled before, and writes down that it ran."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-shared*) ;; *) exit 0;; esac\n'  # an object file, which no one reads
        f"echo $$ >> {tmp_path}/runs\n"
        f"[ -e {tmp_path}/hang ] && exec sleep 60\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'exec cp {compiled} "$2"\n'
    )
    script.chmod(0o755)
    return str(script)


def runs(compiler: str) -> list[int]:
    """The processes that compiled."""
    file = pathlib.Path(compiler).with_name("runs")
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def works(compiler: str) -> bool:
    return library.load(compiler, isa.ISAS["portable"]).fp8_probe() == 1


def start(run: Callable[[], object]) -> int:
    """A process that does this and ends, with 0 if the result was true. It is forked: importing torch takes seconds."""
    if child := os.fork():
        return child
    try:
        os._exit(0 if run() else 1)
    finally:
        os._exit(2)


def ends_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def named(folder: pathlib.Path) -> list[str]:
    """What is in the folder but for locks."""
    return sorted(file.name for file in folder.iterdir() if file.suffix != ".lock") if folder.exists() else []


def write_whole(folder: pathlib.Path) -> pathlib.Path:
    (folder / "file").write_text("whole")
    return folder / "file"


def kept(make: Callable[[pathlib.Path], pathlib.Path] = write_whole, key: str = "key") -> pathlib.Path:
    path = kept_files.kept("stem", ".txt", key, make)
    assert path.read_bytes()[:-32] == b"whole"
    return path


def never(folder: pathlib.Path) -> pathlib.Path:
    raise AssertionError("nothing was to be made")


def wait_until(there: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not there():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def test_of_several_threads_one_makes_the_file_and_no_other_waits_for_ever(cache, monkeypatch) -> None:
    made = []

    def make(folder: pathlib.Path) -> pathlib.Path:
        made.append(folder)
        time.sleep(0.2)
        return write_whole(folder)

    askers = [threading.Thread(target=kept, args=(make,)) for _ in range(3)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join()
    assert len(made) == 1
    kept(never).unlink()
    (lock,) = cache.glob("*.lock")
    monkeypatch.setattr(kept_files, "LONGEST_WAIT", 0.1)
    with FileLock(lock):  # of one that hangs
        kept(make)
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "another", "no library", "a bit"])
def test_a_damaged_library_is_compiled_again_and_not_loaded(cache, compiler, compiled, damage: str) -> None:
    assert ends_well(start(lambda: works(compiler)))
    (path,) = cache.glob("*.so")
    whole = path.read_bytes()
    flipped = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "empty": b"",
            "another": pathlib.Path(compiled).read_bytes(),  # whole by itself, and of another name
            "no library": b"not a library",
            "a bit": flipped,
        }[damage]
    )
    assert ends_well(start(lambda: works(compiler)))
    assert path.read_bytes() == whole
    assert len(runs(compiler)) == 2


def test_a_file_is_on_the_disk_before_its_name_is(cache, monkeypatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(*names: object) -> None:
        done.append("rename")
        replace(*names)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    kept()
    assert done == ["file", "rename", "folder"]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_no_one_else_may_write_what_is_kept_whatever_the_umask(cache, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = kept()
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    assert kept(never) == path


def belongs_to_a_stranger(path: pathlib.Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def may_be_written_by_all(path: pathlib.Path) -> None:
    path.chmod(path.stat().st_mode | 0o022)


def is_a_link(path: pathlib.Path) -> None:
    moved = path.rename(path.with_name(path.name + "_moved"))
    path.symlink_to(moved)


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize(
    "change, got",
    [
        (belongs_to_a_stranger, f"got one that user {STRANGER} owns"),
        (may_be_written_by_all, "got one that others may write"),
        (is_a_link, "got a link"),
    ],
)
def test_what_others_may_have_written_is_not_used(cache, caplog, what: str, change, got: str) -> None:
    if change is belongs_to_a_stranger and os.geteuid():
        pytest.skip("only root may give files away")
    path = kept()
    change(path if what == "file" else cache)
    own = kept()
    assert own != path and own.parent.name.startswith("fp8_compile_")
    assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    assert kept(never) == own
    (record,) = caplog.records
    message = record.getMessage()
    assert got in message and f"is not used: expected a {what} of user" in message
    assert "Remove it, or set TORCHINDUCTOR_CACHE_DIR" in message


def test_a_private_folder_is_gone_after_its_process(cache, tmp_path, monkeypatch) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))

    def use_and_exit() -> bool:
        atexit._clear()  # what the parent will do at its end
        there = kept().exists() and len(named(private)) == 1
        atexit._run_exitfuncs()
        return there

    assert ends_well(start(use_and_exit))
    assert named(private) == []


@pytest.mark.parametrize("where", ["the cache", "fp8_compile", "kernels"])
def test_a_file_where_a_folder_should_be_is_said_and_does_no_harm(cache, caplog, where: str) -> None:
    path = {"kernels": cache, "fp8_compile": cache.parent, "the cache": cache.parent.parent}[where]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a file")
    kept()
    (record,) = caplog.records
    message = record.getMessage()
    assert str(path) in message and "expected a folder" in message and "to another folder" in message
    assert "File exists" in message or "Not a directory" in message or "got a file" in message
    assert path.read_text() == "a file"


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(cache) -> None:
    kept()
    inside, go_on = threading.Event(), threading.Event()

    def make(folder: pathlib.Path) -> pathlib.Path:
        inside.set()
        assert go_on.wait(SOON)
        return write_whole(folder)

    living = threading.Thread(target=kept, args=(make, "of a living one"))
    living.start()
    assert inside.wait(SOON)
    (theirs,) = cache.glob("scratch_*")
    for name in ("scratch_dead", "new_old", "new_young"):
        (cache / name).mkdir()
        (cache / name / "half.o").write_text("half")
    os.utime(cache / "new_old", (0, 0))
    kept(key="another")
    folders = {one.name for one in cache.iterdir() if one.is_dir()}
    go_on.set()
    living.join()
    assert folders == {theirs.name, "new_young"}
    assert {one.name for one in cache.iterdir() if one.is_dir()} == {"new_young"}


def test_of_twenty_processes_that_start_at_once_one_compiles_and_all_work(cache, compiler) -> None:
    ready, go = os.pipe()

    def wait_and_load() -> bool:
        os.close(go)
        os.read(ready, 1)  # until the other end is closed
        return works(compiler)

    children = [start(wait_and_load) for _ in range(20)]
    os.close(go)
    os.close(ready)
    assert [ends_well(child) for child in children] == [True] * 20
    assert len(runs(compiler)) == 1
    assert len(named(cache)) == 1
    works(compiler)
    assert len(runs(compiler)) == 1


def test_a_process_that_is_killed_while_it_compiles_leaves_nothing_that_looks_whole(cache, compiler) -> None:
    hang = pathlib.Path(compiler).with_name("hang")
    hang.touch()
    child = start(lambda: works(compiler))
    wait_until(lambda: runs(compiler))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(runs(compiler)[0], signal.SIGKILL)  # the compiler lives on without who started it
    assert [name.partition("_")[0] for name in named(cache)] == ["scratch"]
    hang.unlink()
    assert ends_well(start(lambda: works(compiler)))
    (name,) = named(cache)
    assert name.endswith(".so")


@pytest.fixture
def disk(cache: pathlib.Path) -> Iterator[Callable[[str], None]]:
    """The cache on a disk of its own, whose options can be changed."""
    folder = cache.parent.parent
    folder.mkdir(parents=True)

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True, capture_output=True)

    try:
        mount("size=100k")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small disk takes root's rights")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_nothing_and_the_next_process_with_room_uses_it(cache, disk, compiler, caplog) -> None:
    assert works(compiler)  # from a private folder
    assert "No space left on device" in caplog.text and "Mend it, or set TORCHINDUCTOR_CACHE_DIR" in caplog.text
    assert named(cache) == []
    disk("remount,size=10m")
    assert ends_well(start(lambda: works(compiler)))
    assert len(named(cache)) == 1


def test_a_disk_that_is_full_at_the_last_byte_leaves_nothing(cache, monkeypatch, caplog) -> None:
    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_room)
        with pytest.raises(RuntimeError, match="can't be stored: expected a folder with room.*No space left.*TMPDIR"):
            kept()
    assert named(cache) == []
    assert kept().parent == cache


def test_a_cache_that_can_only_be_read_is_read_and_does_no_harm(cache, disk, compiler, caplog) -> None:
    disk("remount,ro")
    assert works(compiler)
    assert "Read-only file system" in caplog.text
    disk("remount,rw,size=10m")
    assert works(compiler)
    compiled = len(runs(compiler))
    disk("remount,ro")
    caplog.clear()
    assert works(compiler)
    assert len(runs(compiler)) == compiled and not caplog.records
