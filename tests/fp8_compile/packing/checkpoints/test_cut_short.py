"""Writes that end in the middle: kill -9, a full disk, a folder that can't be written to. What was whole stays whole,
and nothing looks whole that is not."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fp8_compile.aot_package.export  # noqa: F401  its module is looked up below: the name is the function's
from fp8_compile import load_checkpoint, pack, pack_folder, save_checkpoint, whole_files
from fp8_compile.scaling.distributed_checkpoint import load_scaling_state

# One process for all, since importing torch takes longer than everything else here: each scenario is a fork of it that
# kills itself with signal 9.
SCENARIOS = """
import os, pathlib, resource, signal, sys
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
import fp8_compile
import fp8_compile.aot_package.export
from fp8_compile.aot_package.manifest import Manifest, here
from fp8_compile.report import Report

root = pathlib.Path(sys.argv[1])
replace = os.replace

def packed(seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    fp8_compile.pack(model, progress=False)
    return model

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_rename(number):
    # A reader begins to see a file when it is renamed to its name; 0 is before the first of them.
    renames = []
    def replaced(source, target):
        if len(renames) == number:
            die()
        renames.append(target)
        replace(source, target)
    os.replace = replaced

def save(number):
    model = packed(1)
    die_at_rename(number)
    fp8_compile.save_checkpoint(model, root / f"save_{number}", shard_bytes=5000)

def pack_folder(number):
    die_at_rename(number)
    fp8_compile.pack_folder(root / "source", root / f"pack_{number}", progress=False)

def export():
    module = sys.modules["fp8_compile.aot_package.export"]
    def half(path, files, extra_files):
        path.write_bytes(b"half of it")
        die()
    module.write_package = half
    report = Report((), "packed", "cpu")
    manifest = Manifest(**here(), cpu_features=(), weights=None, options={}, report=report, inputs=(), ranges={})
    module._write(root / "export" / "model.pt2", [], manifest)

def distributed():
    state = fp8_compile.ScalingState()
    row = {"scale": torch.ones(()), "amax_history": torch.ones(16), "counts": torch.ones(5, dtype=torch.int32),
           "largest": torch.tensor(448.0)}
    state.load_state_dict({f"a#0.input.{name}": value for name, value in row.items()})
    FileSystemWriter.finish = die
    dcp.save({"scaling": state.state_dict()}, checkpoint_id=root / "distributed")

def limit():
    model = packed(0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        fp8_compile.save_checkpoint(model, root / "limit")
    except OSError as error:
        (root / "limit" / "said").write_text(str(error))
    die()

for scenario, *arguments in (*((save, n) for n in range(4)), (pack_folder, 0), (pack_folder, 1), (export,),
                             (distributed,), (limit,)):
    child = os.fork()
    if not child:
        try:
            scenario(*arguments)
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (scenario.__name__, arguments, status)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder in which every scenario was killed: old checkpoints and a package were there before."""
    root = tmp_path_factory.mktemp("killed")
    for number in range(4):
        save_checkpoint(packed(0), root / f"save_{number}")
    write_source(root / "source")
    (root / "export").mkdir()
    (root / "export" / "model.pt2").write_bytes(b"the old one")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SCENARIOS, str(root)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return root


def write_source(folder: pathlib.Path) -> None:
    folder.mkdir()
    save_file(dict(plain(0).state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def plain(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})


def packed(seed: int = 0) -> nn.ModuleDict:
    model = plain(seed)
    pack(model, progress=False)
    return model


def is_of(folder: pathlib.Path, seed: int) -> bool:
    """Whether a folder has the weights of the model of a seed, all of them."""
    model, expected = load_checkpoint(plain(9), folder), packed(seed)
    return all(torch.equal(model[name].codes, expected[name].codes) for name in ("a", "b"))


def looks_whole(folder: pathlib.Path) -> bool:
    return (folder / "config.json").exists()


@pytest.mark.parametrize("renames", [0, 1, 2, 3])
def test_a_killed_save_checkpoint_leaves_the_old_one_the_new_one_or_none_that_looks_whole(
    renames: int, killed: pathlib.Path
) -> None:
    folder = killed / f"save_{renames}"
    assert not looks_whole(folder), "config.json comes last, and there are more files than renames"
    try:
        assert is_of(folder, 0) or is_of(folder, 1)
    except ValueError:
        pass
    save_checkpoint(packed(2), folder)  # the next one is not disturbed by what is left
    assert looks_whole(folder) and is_of(folder, 2)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_killed_pack_folder_leaves_nothing_that_looks_whole(renames: int, killed: pathlib.Path) -> None:
    target = killed / f"pack_{renames}"
    assert target.exists() and not looks_whole(target)
    pack_folder(killed / "source", target, progress=False)
    assert looks_whole(target) and is_of(target, 0) and not list(target.glob(".*.part"))


def test_a_killed_export_leaves_the_package_that_was_there(killed: pathlib.Path) -> None:
    folder = killed / "export"
    assert (folder / "model.pt2").read_bytes() == b"the old one"
    assert [file.name for file in folder.glob("*.pt2")] == ["model.pt2"], "the rest is in a hidden folder"


def test_a_killed_distributed_checkpoint_has_no_metadata_and_is_refused(killed: pathlib.Path) -> None:
    folder = killed / "distributed"
    assert list(folder.glob("*.distcp")) and not (folder / ".metadata").exists()
    with pytest.raises(ValueError, match=r"has no \.metadata.*cut short"):
        load_scaling_state(plain(), folder)


def test_a_real_limit_of_the_system_leaves_no_part_of_a_file(killed: pathlib.Path) -> None:
    folder = killed / "limit"
    assert "File too large" in (folder / "said").read_text() and [one.name for one in folder.iterdir()] == ["said"]


class FullDisk:
    """A file on a disk with room for some bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return self.file.write(data)


@pytest.mark.parametrize("room", [0, 500, 5000])
def test_a_full_disk_is_an_error_and_leaves_nothing_that_looks_whole(
    room: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write_source(source)
    save_checkpoint(packed(0), tmp_path / "saved")
    before = (tmp_path / "saved" / "model.safetensors").read_bytes()
    model = packed(1)
    with monkeypatch.context() as patch:
        patch.setattr(whole_files, "open", lambda *given: FullDisk(open(*given), room), raising=False)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(model, tmp_path / "saved", shard_bytes=8000)
        with pytest.raises(OSError, match="No space left"):
            pack_folder(source, tmp_path / "packed", progress=False)
    for folder in (tmp_path / "saved", tmp_path / "packed"):
        assert not looks_whole(folder) and not list(folder.glob(".*")), "and the half-written part is gone"
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("write", ["save_checkpoint", "pack_folder", "export"])
def test_a_folder_that_can_not_be_written_to_keeps_what_it_has(write: str, tmp_path: pathlib.Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_source(source)
    save_checkpoint(packed(0), target)
    target.chmod(0o555)
    if os.access(target, os.W_OK):  # root writes everywhere: a file in place of the folder stops even root
        target.chmod(0o755)
        kept, target = target, tmp_path / "file" / "target"
        target.parent.write_text("not a folder")
    else:
        kept = target
    model = packed(1)
    try:
        with pytest.raises(OSError):
            if write == "save_checkpoint":
                save_checkpoint(model, target)
            elif write == "pack_folder":
                pack_folder(source, target, progress=False)
            else:
                sys.modules["fp8_compile.aot_package.export"]._write(target / "model.pt2", [], None)  # type: ignore[arg-type]
    finally:
        kept.chmod(0o755)
    assert looks_whole(kept) and is_of(kept, 0)


def test_a_failed_write_does_not_take_the_config_of_a_checkpoint_that_stays(tmp_path: pathlib.Path) -> None:
    """A model that can't be stored is found out before anything is removed."""
    save_checkpoint(packed(0), tmp_path)
    odd = nn.ModuleDict({"a": nn.Linear(40, 16)})
    pack(odd, progress=False)
    with pytest.raises(ValueError):
        save_checkpoint(odd, tmp_path)
    assert looks_whole(tmp_path) and is_of(tmp_path, 0)
