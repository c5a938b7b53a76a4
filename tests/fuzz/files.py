"""Mutated files: each reader gives a result or a ValueError, TypeError or OSError in words, soon and in little memory.

    python tests/fuzz/files.py --seconds 300 [--seed 0] [--keep folder]

Files of every kind that we read (checkpoints of each layout, their index, packages, manifests, scaling states,
reports and recorded passes) are cut short, get other bytes, or other values in their JSON: wrong types, huge numbers,
deep nesting, paths that leave the folder. Code of packages is not run: the archive and its manifest are read, which
comes before.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from typing import Any, Callable, Iterator

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8_compile import ScalingState, load_checkpoint, pack, pack_folder, save_checkpoint
from fp8_compile.aot_package.manifest import Manifest, here, read_manifest
from fp8_compile.packing.checkpoints.files import INDEX
from fp8_compile.passes.graph.row import Row
from fp8_compile.report import Report
from fp8_compile.reporting.report_page import load as load_page
from fp8_compile.reporting.report_page import page

EXPECTED = (ValueError, TypeError, OSError)
HANG_SECONDS, MOST_GROWTH = 5, 1 << 30
NEST = "a marker that stands for deep nesting"
EVIL: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), "", "../x", "/etc/passwd", "\ud800", "a\0b", [], {}, [[]],
    {"x": None}, "9" * 5000, NEST, [1] * 1000, "F8_E4M3", "U8", "weight", [0, 2**62], [5, 3],
)  # fmt: skip
ROW = Row("up", "output", (8, 16, 16), "rewritten", "eligible", formats=("e4m3", "e4m3"))


@dataclasses.dataclass
class Kind:
    """A kind of file: ``write`` makes a valid folder once, ``read`` reads it, ``files`` are mutated."""

    write: Callable[[pathlib.Path], None]
    read: Callable[[pathlib.Path], Any]
    files: tuple[str, ...]
    whole: bool = False  # whether a file that is cut short must be refused


class Hang(Exception):
    """A reader that took too long."""


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(32, 32), "norm": nn.LayerNorm(32)})


def checkpoint(layout: str) -> Kind:
    def write(folder: pathlib.Path) -> None:
        one = model()
        pack(one, "fp8" if layout == "fp8" else "nvfp4", progress=False)
        save_checkpoint(one, folder, "compressed-tensors" if layout == "fp8" else layout)

    return Kind(write, read_checkpoint, ("model.safetensors",), whole=True)


def read_checkpoint(folder: pathlib.Path) -> None:
    loaded = load_checkpoint(model(), folder)
    assert loaded["norm"].weight.dtype == torch.float32 and loaded["a"].weight.shape == (32, 32)


def write_index(folder: pathlib.Path) -> None:
    one = model()
    pack(one, progress=False)
    save_checkpoint(one, folder, shard_bytes=600)


def write_source(folder: pathlib.Path) -> None:
    folder.mkdir(exist_ok=True)
    save_file(dict(model().state_dict()), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "layers": [1, 2]}')


def read_source(folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as target:
        pack_folder(folder, pathlib.Path(target) / "out", method="rtn", progress=False)


def write_package(folder: pathlib.Path) -> None:
    folder.mkdir(exist_ok=True)
    inputs = ({"name": "x", "dtype": "float32", "shape": ["s0", 64]}, {"name": "flag", "value": True})
    report = Report((ROW,), "packed", "cpu")
    manifest = Manifest(
        **here(), cpu_features=(), weights="nvfp4", options={"method": "rtn"}, report=report, inputs=inputs,
        ranges={"s0": [2, None]},
    )  # fmt: skip
    (folder / "manifest.json").write_text(manifest.to_json())


def read_package(folder: pathlib.Path) -> Any:
    """The archive with the manifest that is in the folder."""
    if not (folder / "model.pt2").exists():
        with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
            archive.writestr("model/data/aotinductor/model/x.wrapper.so", b"code" * 100)
            archive.writestr("model/extra/fp8_compile.json", (folder / "manifest.json").read_bytes())
            archive.writestr("model/archive_version", "0")
    manifest = read_manifest(folder / "model.pt2")
    return str(manifest.report), manifest.to_json()


def write_archive(folder: pathlib.Path) -> None:
    write_package(folder)
    read_package(folder)


def write_dump(folder: pathlib.Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps(Report((ROW,), "delayed", "cpu").to_dict()))
    (folder / "graphs.json").write_text(json.dumps({"strings": ["", "mm"], "stages": [{"name": [1], "inputs": [[]]}]}))
    fields = {"amax": [1.0], "scale": [2.0], "elements": [8], "overflow": [0], "underflow": [1], "sqnr": [30.0]}
    moments = [{"pass": number, "step": number, **fields} for number in range(3)]
    lines = [{"slots": ["up#0.input"], "largest": [448.0]}, *moments]
    (folder / "passes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def valid_state() -> dict[str, Tensor]:
    row = {"scale": torch.ones(()), "amax_history": torch.ones(4), "counts": torch.ones(5, dtype=torch.int32)}
    tensors = {f"a#{use}.input.{name}": one.clone() for use in (0, 1) for name, one in row.items()}
    return {**tensors, **{f"a#{use}.input.largest": torch.tensor(448.0) for use in (0, 1)}}


def write_state(folder: pathlib.Path) -> None:
    folder.mkdir(exist_ok=True)
    save_file(valid_state(), folder / "state")


def read_state(folder: pathlib.Path) -> None:
    try:
        saved: dict[Any, Any] = dict(load_file(folder / "state"))
    except Exception:  # safetensors' own business: what is in it is mutated below
        saved = dict(valid_state())
    changes = random.Random((folder / "state").stat().st_size ^ sum((folder / "state").read_bytes()))
    if saved and changes.random() < 0.7:
        key = changes.choice(sorted(saved))
        odd = [torch.zeros(2, 2), torch.tensor(1j), torch.ones((), device="meta"), torch.ones(4).to_sparse()]
        saved[changes.choice([key, f"{key}x", 3, "#.scale", "scale"])] = changes.choice([*EVIL, *odd])
    state = ScalingState()
    try:
        state.load_state_dict(saved)
    except EXPECTED:
        assert not state.state_dict(), "a state that does not fit changes nothing"
        raise
    assert all(isinstance(one, Tensor) and bool(one.isfinite().all()) for one in state.state_dict().values())


KINDS = {
    "compressed-tensors": checkpoint("compressed-tensors"),
    "modelopt": checkpoint("modelopt"),
    "fp8": checkpoint("fp8"),
    "index": Kind(write_index, read_checkpoint, (INDEX,)),
    "source folder": Kind(write_source, read_source, ("config.json", "model.safetensors")),
    "manifest": Kind(write_package, read_package, ("manifest.json",)),
    "package": Kind(write_archive, read_package, ("model.pt2",), whole=True),
    "dump": Kind(write_dump, lambda folder: page(load_page(folder)), ("report.json", "graphs.json", "passes.jsonl")),
    "scaling state": Kind(write_state, read_state, ("state",)),
}


def mutated(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and the bytes."""
    how = rng.choice(["cut", "flip", "flip", "insert", "zeros", "json", "json", "json", "json"])
    place = rng.randrange(len(data))
    if how == "cut":
        return how, data[:place]
    if how == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 4, 32])):
            near = rng.random() < 0.7  # headers are at the front
            changed[rng.randrange(min(len(data), 600) if near else len(data))] = rng.randrange(256)
        return how, bytes(changed)
    if how == "insert":
        return how, data[:place] + rng.randbytes(rng.choice([1, 8, 300])) + data[place:]
    if how == "zeros":
        return how, data[:place] + bytes(len(data[place : place + 64])) + data[place + 64 :]
    return how, mutated_json(data, rng)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """Another value somewhere in the JSON of a file: the header of safetensors, a line of lines, or all of it."""
    if data[8:9] == b"{":
        (length,) = struct.unpack("<Q", data[:8])
        text = changed_json(data[8 : 8 + length], rng)
        return struct.pack("<Q", rng.choice([len(text)] * 9 + [2**63 - 1])) + text + data[8 + length :]
    if data[:1] == b"{" and data.count(b"\n{"):
        lines = data.splitlines()
        number = rng.randrange(len(lines))
        with contextlib.suppress(ValueError):
            lines[number] = changed_json(lines[number], rng)
        return b"\n".join(lines) + b"\n"
    with contextlib.suppress(ValueError):
        return changed_json(data, rng)
    return data[::-1]


def changed_json(text: bytes, rng: random.Random) -> bytes:
    data = json.loads(text)
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = list(walk(data))
        if not places:
            break
        parent, key = rng.choice(places)
        other, there = rng.choice(places)
        change = rng.choice(["evil", "evil", "swap", "drop", "rename"])
        if change == "evil":
            parent[key] = rng.choice(EVIL)
        elif change == "swap":
            parent[key], other[there] = other[there], parent[key]
            if any(data is one for one in (parent[key], other[there])):
                return b"[]"
        elif isinstance(parent, dict):
            value = parent.pop(key)
            if change == "rename":
                parent[rng.choice(["", "../x", f"{key}x", "a.weight", "b.weight_scale"])] = value
        try:
            json.dumps(data)
        except (ValueError, RecursionError):  # swapped into itself
            return text[: len(text) // 2]
    deep = rng.choice(["[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "[" * 200_000])
    return json.dumps(data).replace(json.dumps(NEST), deep).encode()


def walk(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value: the container and the key in it."""
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from walk(data[key])


def one_case(kind: Kind, base: pathlib.Path, folder: pathlib.Path, rng: random.Random) -> tuple[str, str]:
    """What was done, and what came of it: "read", or the name of the error. Anything else is raised."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    file = folder / rng.choice(kind.files)
    before = file.read_bytes()
    how, data = mutated(before, rng)
    file.write_bytes(data)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        kind.read(folder)
    except EXPECTED as error:
        assert str(error), f"{type(error).__name__} without a message"
        return how, type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert not (kind.whole and how == "cut" and data != before), "a file that was cut short was read"
    return how, "read"


def run(
    seconds: float, seed: int = 0, keep: pathlib.Path | None = None, most_failures: int = 20
) -> tuple[collections.Counter[Any], list[str]]:
    """Counts by kind and outcome, and what went wrong."""

    def hang(*_: object) -> None:
        raise Hang(f"more than {HANG_SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    counts: collections.Counter[Any] = collections.Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in KINDS.items():
            kind.write(pathlib.Path(root, "valid", name))
            kind.read(shutil.copytree(pathlib.Path(root, "valid", name), pathlib.Path(root, "check", name)))
        start, number = time.monotonic(), 0
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        while time.monotonic() - start < seconds and len(failures) < most_failures:
            name = list(KINDS)[number % len(KINDS)]
            folder = pathlib.Path(root, "case")
            try:
                valid, rng = pathlib.Path(root, "valid", name), random.Random(f"{seed} {number}")
                how, outcome = one_case(KINDS[name], valid, folder, rng)
                counts[name, outcome] += 1
                grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory
                assert grown < MOST_GROWTH, f"{grown:,} bytes of memory"
            except Exception:
                failures.append(f"{name}, seed {seed}, case {number}:\n{traceback.format_exc(limit=-4)}")
                if keep is not None:
                    shutil.copytree(folder, keep / f"{seed}_{number}", dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            number += 1
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=pathlib.Path, help="copy files that a reader failed on there")
    options = parser.parse_args()
    counts, failures = run(options.seconds, options.seed, options.keep)
    for name in KINDS:
        outcomes = {outcome: count for (kind, outcome), count in sorted(counts.items()) if kind == name}
        print(f"{name:>20}: {sum(outcomes.values()):>7,} cases; {', '.join(f'{n:,} {o}' for o, n in outcomes.items())}")
    print(f"{sum(counts.values()):,} cases, {len(failures)} failures", *failures, sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
