"""Packages: what they compute, what they hold, what they refuse."""

from __future__ import annotations

import copy
import json
import os
import pathlib
import subprocess
import sys
import tracemalloc
import zipfile
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import fp8_compile
from fp8_compile.aot_package import manifest as package_manifest
from fp8_compile.report import Report


class Attention(nn.Module):
    """Tied weights, a keyword argument, a value that is part of the code, two results, a view as a layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.query = nn.Linear(64, 512), nn.Linear(512, 64, bias=False), nn.Linear(40, 64)
        self.again = nn.Linear(512, 64, bias=False)
        self.again.weight = self.down.weight

    def forward(self, x: Tensor, double: bool, *, scale: Tensor) -> dict[str, Tensor]:
        hidden = F.gelu(self.up(x))
        mixed = self.down(hidden) + self.again(hidden.flip(-1))
        query = self.query(mixed[..., :40])
        weights = (query @ query.transpose(-1, -2) / 8).softmax(-1)
        return {"mixed": weights @ mixed * scale * (2 if double else 1), "hidden": hidden}


class Exported(NamedTuple):
    model: nn.Module
    before: dict[str, Tensor]
    path: pathlib.Path
    report: Report
    scale: Tensor


SIZES = (5, 7), (1, 3), (2, 1), (3, 64)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Made once: C++ with the headers of torch, for a package and by AOTInductor, is compiled in half a minute."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("export") / "model.pt2"
    model, scale = Attention().eval(), torch.rand(64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = {"x": {0: Dim("batch"), 1: Dim("tokens", max=64)}, "double": None, "scale": None}
    example = (torch.randn(2, 5, 64), True)
    report = fp8_compile.export(
        model, example, path, kwargs={"scale": scale}, weights="nvfp4", method="rtn", dynamic_shapes=sizes
    )
    return Exported(model, before, path, report, scale)


@pytest.fixture
def damaged(exported: Exported, tmp_path: pathlib.Path) -> Any:
    """A function that writes a package with its manifest changed, and more or fewer files."""

    def write(change: Any = None, more: dict[str, bytes] | None = None) -> pathlib.Path:
        path = tmp_path / "model.pt2"
        with zipfile.ZipFile(exported.path) as source, zipfile.ZipFile(path, "w") as target:
            for name in source.namelist():
                data = source.read(name)
                if name.endswith(package_manifest.FILE) and change:
                    manifest = json.loads(data)
                    change(manifest)
                    data = json.dumps(manifest).encode()
                target.writestr(name, data)
            for name, data in (more or {}).items():
                target.writestr(name, data)
        return path

    return write


def test_the_package_computes_what_the_compiled_model_does_bit_for_bit(exported: Exported) -> None:
    loaded = fp8_compile.load(exported.path)
    packed = copy.deepcopy(exported.model)
    fp8_compile.pack(packed, method="rtn", progress=False)
    compiled = torch.compile(packed, backend="fp8", dynamic=True)
    for batch, tokens in SIZES:
        x = torch.randn(batch, tokens, 64)
        with torch.no_grad():
            got, wanted = loaded(x, True, scale=exported.scale), compiled(x, True, scale=exported.scale)
            plain = exported.model(x, True, scale=exported.scale)
        assert list(got) == ["mixed", "hidden"]
        for name in got:
            assert torch.equal(got[name], wanted[name]), (name, batch, tokens)
            assert 0 < (got[name] - plain[name]).norm() < 0.2 * plain[name].norm()


def test_a_fresh_process_runs_it_without_compiling_and_without_the_models_code(
    exported: Exported, tmp_path: pathlib.Path
) -> None:
    x = torch.randn(3, 4, 64)
    wanted = fp8_compile.load(exported.path)(x, True, scale=exported.scale)
    torch.save({"x": x, "scale": exported.scale, **wanted}, tmp_path / "tensors.pt")
    code = (
        "import sys, torch, fp8_compile\n"
        "torch.load, load = None, torch.load\n"  # nothing is unpickled by the package
        "tensors = load(sys.argv[2])\n"
        "got = fp8_compile.load(sys.argv[1])(tensors['x'], True, scale=tensors['scale'])\n"
        "slow = [name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules]\n"
        "print([torch.equal(got[name], tensors[name]) for name in got], slow)\n"
    )
    environment = {**os.environ, "CXX": "false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    arguments = [sys.executable, "-c", code, str(exported.path), str(tmp_path / "tensors.pt")]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.strip() == "[True, True] []", done.stderr
    assert not list((tmp_path / "cache").rglob("*.so")) and not list((tmp_path / "cache").rglob("*.cpp"))


def test_the_users_model_is_as_it_was_and_no_scratch_is_left(exported: Exported) -> None:
    assert type(exported.model.up) is nn.Linear and exported.model.again.weight is exported.model.down.weight
    state = exported.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in exported.before.items())
    assert [file.name for file in exported.path.parent.iterdir()] == ["model.pt2"]


def test_the_manifest_accounts_for_every_matmul_and_says_what_the_package_needs(exported: Exported) -> None:
    loaded = fp8_compile.load(exported.path)
    assert loaded.report.rows == exported.report.rows
    assert [row.module for row in loaded.report.rewritten] == ["up", "down", "again", "query"]
    assert [row.reason for row in loaded.report.skipped] == ["not packed: in the model's own precision"] * 2
    manifest = loaded.manifest
    assert manifest.weights == "nvfp4" and manifest.options == {"method": "rtn"} and manifest.calibration is None
    assert manifest.torch == torch.__version__.partition("+")[0]
    assert [one["name"] for one in manifest.inputs] == ["x", "double", "scale"]


def test_the_package_holds_each_packed_weight_once_and_no_other(exported: Exported) -> None:
    packed = copy.deepcopy(exported.model)
    fp8_compile.pack(packed, method="rtn", progress=False)
    with zipfile.ZipFile(exported.path) as archive:
        parts = [archive.read(name) for name in archive.namelist()]
    for name in ("up", "down", "query"):
        for part in ("codes", "block_scales"):
            data = getattr(getattr(packed, name), part).view(torch.uint8).numpy().tobytes()
            assert sum(one.count(data) for one in parts) == 1, (name, part)
        weight = getattr(exported.model, name).weight.detach().numpy().tobytes()
        assert not any(weight[:256] in one for one in parts), name
        assert getattr(packed, name).memory_bytes() <= 0.15 * len(weight) or name == "query"  # K=40 is padded to 48


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(2, 5, 48), True), r"input x: expected shape \[s\d+, s\d+, 64\].*got \[2, 5, 48\]"),
        ((torch.zeros(2, 65, 64), True), r"input x: expected shape .*<= 64.*got \[2, 65, 64\]"),
        ((torch.zeros(5, 64), True), "input x: expected shape"),
        ((torch.zeros(2, 5, 64), False), "input double was True when the model was exported.*export again"),
        ((torch.zeros(2, 5, 64, dtype=torch.float16), True), "input x: expected float32, got float16"),
        ((torch.zeros(2, 5, 64),), "exported for arguments like"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(exported: Exported, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fp8_compile.load(exported.path)(*arguments, scale=exported.scale)


class Twice(nn.Module):
    """A size that is another one's double, and operations whose code walks over its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x.sin()).repeat(2, 1) + 2 * y


def test_inputs_lie_as_they_like_and_a_size_that_follows_from_another_is_checked(tmp_path: pathlib.Path) -> None:
    model, path, batch = Twice().eval(), tmp_path / "two words" / "model.pt2", Dim("batch", min=2, max=64)
    example = torch.randn(32, 4).t(), torch.randn(32, 8).t()
    fp8_compile.export(model, example, path, weights="fp8", dynamic_shapes=({0: batch}, {0: 2 * batch}))
    loaded = fp8_compile.load(path)
    for x, y in [example, (torch.randn(3, 64)[:, ::2], torch.randn(1, 32).expand(6, 32))]:
        assert torch.equal(loaded(x, y), loaded(x.contiguous(), y.contiguous()))
        torch.testing.assert_close(loaded(x, y), model(x, y), rtol=0.1, atol=0.1)
    for rows in (3, 7, 10):
        with pytest.raises(ValueError, match=rf"input y: expected shape \[2\*s\d+, 32\].*, got \[{rows}, 32\]"):
            loaded(torch.randn(4, 32), torch.randn(rows, 32))


def test_files_that_are_cut_short_changed_or_foreign_are_refused(exported: Exported, tmp_path: pathlib.Path) -> None:
    whole, path = exported.path.read_bytes(), tmp_path / "model.pt2"
    for data in (whole[: len(whole) // 2], whole[:-1000], b"", b"not a package"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="not a package, or cut short or damaged.*copy it again"):
            fp8_compile.load(path)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :])
    with pytest.raises(ValueError, match="damaged.*copy"):
        fp8_compile.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/models/model.json", "{}")
    with pytest.raises(ValueError, match="not a package of fp8_compile.export"):
        fp8_compile.load(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        fp8_compile.load(tmp_path / "absent.pt2")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": 2, "fp8_compile": "9.1"}, r"format 2.*reads format 1; upgrade fp8_compile \(.*9\.1\)"),
        ({"format": 0}, "format 0.*export the model again"),
        ({"torch": "2.1.0"}, "exported with torch 2.1.0.*install torch 2.1"),
        ({"cpu_features": ["avx9000", "fma"]}, "this CPU lacks avx9000.*export the model on this machine"),
        ({"machine": "pdp11"}, "exported for Linux on pdp11"),
        ({"report": None}, "its manifest is not one that export writes: 'report' is NoneType"),
    ],
)
def test_other_versions_and_machines_are_refused(damaged: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_compile.load(damaged(lambda manifest: manifest.update(change)))


def test_files_that_export_does_not_write_are_refused(damaged: Any) -> None:
    for name in ("model/data/weights/weights_0", "model/data/aotinductor/model/../../x.so", "other/x"):
        with pytest.raises(ValueError, match="does not belong in a package"):
            fp8_compile.load(damaged(more={name: b"."}))


def rewritten(source: pathlib.Path, target: pathlib.Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    """A copy of a package with ``change(name, data)`` in place of each file: data, None to leave it out, or a list."""
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(target, "w", compression) as out:
        for name in given.namelist():
            data = change(name, given.read(name))
            for inner, one in data if isinstance(data, list) else [(name, data)] if data is not None else []:
                out.writestr(inner, one)


def test_a_package_with_no_library_two_or_one_that_is_no_code_is_refused(
    exported: Exported, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "model.pt2"
    changes = {
        "expected one library of code.*got none": lambda name, data: None if name.endswith(".so") else data,
        "expected one library of code.*got 2": lambda name, data: (
            [(name, data), (name.replace(".wrapper.so", "2.wrapper.so"), data)] if name.endswith(".so") else data
        ),
        "its code can't be loaded.*export the model again": lambda name, data: (
            b"not a library" if name.endswith(".so") else data
        ),
    }
    for message, change in changes.items():
        rewritten(exported.path, path, change)
        with pytest.raises(ValueError, match=message):
            fp8_compile.load(path)


def test_a_small_file_that_unpacks_to_much_is_refused_by_its_headers(
    exported: Exported, tmp_path: pathlib.Path
) -> None:
    path, honest = tmp_path / "model.pt2", tmp_path / "large.pt2"
    many = 50_000_000
    with zipfile.ZipFile(honest, "w") as archive:
        archive.writestr("model/extra/fp8_compile.json", b"{" + bytes(33 * 2**20))
    rewritten(
        exported.path,
        path,
        lambda name, data: bytes(many) if name.endswith("archive_version") else None if name.endswith(".so") else data,
        zipfile.ZIP_DEFLATED,
    )
    assert path.stat().st_size < 1_000_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="is compressed or encrypted"):
        fp8_compile.load(path)
    with pytest.raises(ValueError, match="fp8_compile.json has 34,603,009 bytes; expected at most"):
        fp8_compile.load(honest)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000, "nothing but headers was read"


def test_headers_that_say_nonsense_are_value_errors(exported: Exported, tmp_path: pathlib.Path) -> None:
    whole, path = exported.path.read_bytes(), tmp_path / "model.pt2"
    first = whole.rindex(b"PK\x05\x06")
    directory = whole.index(b"PK\x01\x02", first - 4000)
    for offset in (*range(directory, directory + 46, 3), *range(first, len(whole), 3), 0, 4, 8, 26, 28):
        for value in (0, 255):
            data = bytearray(whole)
            data[offset] = value
            path.write_bytes(data)
            try:
                package_manifest.read_manifest(path)
            except ValueError as error:
                assert "export the model again" in str(error) or "torch.export.load read others" in str(error)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("torch", 3, "'torch' is int; expected str"),
        ("cpu_features", "avx2", "'cpu_features' is str; expected list"),
        ("cpu_features", [3], "'cpu_features' has something that is not text"),
        ("options", None, "'options' is NoneType; expected dict"),
        ("inputs", [{"name": "x"}], "input x has neither a shape nor a plain value"),
        ("inputs", [{"name": "x", "dtype": "float33", "shape": [2]}], "input x is of dtype 'float33'"),
        ("inputs", [{"name": "x", "dtype": "float32", "shape": [-2]}], r"input x has the shape \[-2\]"),
        ("inputs", [{"name": "x", "dtype": "float32", "shape": ["os.getpid()"]}], "input x has the shape"),
        ("inputs", [], "its code takes 3 inputs, its manifest describes 0"),
        ("ranges", {"s0": 3}, "size s0 varies between 3"),
        ("report", {"rows": 3}, "the report's rows are int"),
        ("report", {"rows": [], "recipe": "packed", "target": 3, "cache": "", "graphs": 1}, "target is int"),
        ("report", {"rows": [{}], "recipe": "", "target": "", "cache": "", "graphs": 1}, "row 0 of the report has"),
        ("format", True, "the package has format True"),
    ],
)
def test_a_manifest_of_other_types_is_refused(damaged: Any, field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_compile.load(damaged(lambda manifest: manifest.update({field: value})))


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"format":' * 200_000, b"[]", b"\xff", b"9" * 5000, b""])
def test_a_manifest_that_is_no_object_or_nested_is_refused(
    exported: Exported, tmp_path: pathlib.Path, text: bytes
) -> None:
    rewritten(exported.path, tmp_path / "model.pt2", lambda name, data: text if name.endswith("le.json") else data)
    with pytest.raises(ValueError, match="model.pt2: its manifest.*[Ee]xport the model again"):
        fp8_compile.load(tmp_path / "model.pt2")


def test_what_can_not_be_exported_is_refused(tmp_path: pathlib.Path) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32)).eval(), torch.zeros(2, 32)
    for wrong, message in (
        ({"weights": "int3"}, "weights='int3' is unknown; expected None or one of: nvfp4, fp8"),
        ({"method": "rtn"}, "method: for packing, but weights=None packs nothing"),
        ({"weights": "fp8", "calibration": fp8_compile.Calibration()}, "say activations='fp8', or leave the calibr"),
        ({"weights": "fp8", "activations": "int8"}, "'int8' is unknown to format='fp8'; expected one of: None, 'fp8'"),
        ({"inductor": {"emulate_precision_cast": True}}, "did you mean 'emulate_precision_casts'"),
        ({"dump": 3}, "dump expects a folder, got 3"),
        ({"format": "onnx"}, "format='onnx' is unknown; expected 'package' or 'exported_program'"),
        ({"format": "exported_program"}, "writes nothing; leave path out"),
        ({"weights": "nvfp4", "activations": "nvfp4"}, "0: NVFP4 with .* has no CPU kernel to export"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8_compile.export(model, (x,), tmp_path / "model.pt2", **wrong)
    with pytest.raises(ValueError, match="ends in .pt2"):
        fp8_compile.export(model, (x,), tmp_path / "model.bin")
    with pytest.raises(ValueError, match="training mode.*model.eval"):
        fp8_compile.export(model.train(), (x,), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_fp8_weights_are_a_byte_each_and_compute_what_the_compiled_model_does(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 128)).eval().to(torch.bfloat16)
    x, path = torch.randn(4, 192, dtype=torch.bfloat16), tmp_path / "model.pt2"
    report = fp8_compile.export(model, (x,), path, weights="fp8", dynamic_shapes=({0: Dim("rows")},))
    assert [row.formats for row in report.rows] == [("bfloat16", "e4m3")] * 2
    fp8_compile.pack(model, "fp8", progress=False)
    compiled, loaded = torch.compile(model, backend="fp8", dynamic=True), fp8_compile.load(path)
    with torch.no_grad():
        for rows in (1, 5):
            x = torch.randn(rows, 192, dtype=torch.bfloat16)
            assert torch.equal(loaded(x), compiled(x))
    with zipfile.ZipFile(path) as archive:
        parts = [archive.read(name) for name in archive.namelist()]
    codes = model[0].codes.view(torch.uint8).numpy().tobytes()
    assert sum(part.count(codes) for part in parts) == 1


def test_a_packed_model_is_taken_as_it_is_and_its_error_is_the_one_that_pack_reports(tmp_path: pathlib.Path) -> None:
    """|error| / |output| on the calibration's inputs; without a calibration of the weight itself: on unit vectors."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exact, self.rounded = nn.Linear(64, 48, bias=False), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.exact(x), self.rounded(x)

    def relative(found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).norm() / wanted.norm())

    model, x = Two().eval().requires_grad_(False), torch.randn(128, 64) @ torch.randn(64, 64)
    calibration, wanted = fp8_compile.calibrate(model, [x], progress=False), model(x)
    packed = copy.deepcopy(model)
    (row,) = fp8_compile.pack(packed, calibration=calibration, include=("exact",), progress=False).packed
    fp8_compile.pack(packed, method="rtn", activations="int8", include=("rounded",), progress=False)
    report = fp8_compile.export(packed, (x,), tmp_path / "model.pt2")
    assert [one.formats for one in report.rows] == [("float32", "e2m1"), ("int8", "e2m1")]
    exact, rounded = fp8_compile.load(tmp_path / "model.pt2")(x)
    assert row.error == pytest.approx(relative(exact, wanted[0]), rel=1e-4) and row.error > 0.02
    layer = packed.rounded
    parts = layer.codes, layer.block_scales, layer.global_scale, layer.bias, "int8", layer.layout
    assert torch.equal(rounded, torch.ops.fp8_compile.nvfp4_mm(x, *parts)), "what the compiled model calls"
    assert relative(rounded, layer(x)) < 1e-6 and 0.02 < relative(rounded, wanted[1]) < 0.2

    alone, unit = nn.Sequential(copy.deepcopy(model.exact)).eval(), torch.eye(64)
    program = fp8_compile.export(alone, (unit,), weights="fp8", format="exported_program").module()
    (row,) = fp8_compile.pack(alone, "fp8", progress=False).packed
    assert row.error == pytest.approx(relative(program(unit), model.exact(unit)), rel=1e-4) and row.error > 0.01


@pytest.mark.parametrize("weights", ["nvfp4", "fp8"])
def test_the_exported_program_is_sound_and_survives_saving(weights: str, tmp_path: pathlib.Path) -> None:
    model, scale = Attention().eval(), torch.rand(64)
    sizes = {"x": {0: Dim("batch"), 1: Dim("tokens", max=64)}, "double": None, "scale": None}
    given = (torch.randn(2, 5, 64), True)
    program = fp8_compile.export(
        model, given, kwargs={"scale": scale}, weights=weights, dynamic_shapes=sizes, format="exported_program"
    )
    ours = [str(node.target) for node in program.graph.nodes if "fp8_compile" in str(node.target)]
    assert ours == [f"fp8_compile.{'nvfp4' if weights == 'nvfp4' else 'fp8'}_mm.default"] * 4
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2").run_decompositions()
    fp8_compile.pack(model, weights, progress=False)
    x = torch.randn(3, 6, 64)
    with torch.no_grad():
        got, wanted = again.module()(x, True, scale=scale), model(x, True, scale=scale)
    torch.testing.assert_close(got, wanted)


def test_a_packed_weight_that_is_read_by_hand_is_refused_with_its_layers_name(tmp_path: pathlib.Path) -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x) + self.up.weight.sum(0)

    with pytest.raises(ValueError, match="nvfp4_dequantize: a packed weight is read by something other.*exclude"):
        fp8_compile.export(ByHand().eval(), (torch.zeros(2, 32),), tmp_path / "model.pt2", weights="nvfp4")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_what_was_there(
    exported: Exported, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = sys.modules["fp8_compile.aot_package.export"], tmp_path / "model.pt2"

    def fail(path: pathlib.Path, *_: Any) -> None:
        path.write_bytes(b"half of it")
        raise OSError("disk full")

    path.write_bytes(b"before")
    monkeypatch.setattr(module, "write_package", fail)
    with pytest.raises(OSError, match="disk full"):
        module._write(path, [], fp8_compile.load(exported.path).manifest)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
