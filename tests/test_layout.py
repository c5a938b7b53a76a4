"""The house rules that a machine can check: who imports whom, what files are called, how long they get."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folder -> the name it is installed as.
PACKAGES = {"fp8_compile": "fp8_compile", "passes": "fp8_compile.passes", "kernels": "fp8_compile.kernels"}
OUR_FOLDERS = (*PACKAGES, "tests", "examples", "benchmarks")
WALL = "fp8_compile.torch_internals"
# What every pass is written with.
WORDS = ("fp8_compile.passes.graph", "fp8_compile.passes.graph_pass")
# Folder -> what it may import of ours. Imports go fp8_compile -> passes -> kernels -> torch_internals, never back;
# whole_files imports nothing of ours.
ALLOWED = {
    "passes": ("fp8_compile.passes", "fp8_compile.kernels", WALL),
    "kernels": ("fp8_compile.kernels", WALL),
    "fp8_compile/torch_internals": (WALL, "fp8_compile.whole_files"),
    "passes/graph": ("fp8_compile.passes.graph", "fp8_compile.kernels", WALL),
    "passes/joint": (*WORDS, "fp8_compile.passes.joint", "fp8_compile.kernels", WALL),
    "passes/split": (*WORDS, "fp8_compile.passes.split", "fp8_compile.kernels", WALL),
    "kernels/inductor": ("fp8_compile.kernels", WALL),
}
# Room of fp8_compile -> the rooms that it may import. What stands beside the rooms is for all of them.
ROOMS = {
    "torch_internals": set[str](),
    "scaling": set[str](),
    "reporting": {"scaling"},
    "training": {"scaling"},
    "packing": {"scaling"},
    "backend": {"reporting", "scaling"},
    "aot_package": {"backend", "packing"},
    "cli": {"packing", "reporting"},
}
# Modules beside the rooms that stand on one of them.
ON_ROOMS = {"__init__", "__main__", "hugging_face", "lightning", "sharded_checkpoint"}
# Where private parts of other packages may be named, and of which packages they are private.
BEHIND_THE_WALL = ("fp8_compile/torch_internals", "kernels/inductor", "kernels/gpu")
OTHERS = ("torch", "triton", "transformers", "lightning", "torchao")
# Attributes of torch's objects that begin with an underscore, on whatever they are.
PRIVATE_ATTRIBUTES = {
    "_version", "_orig_mod", "_local_tensor", "_compiled_call_impl", "_schema", "_dynamo_source", "_compiler_ctx",
}  # fmt: skip
MOST_LINES, MOST_TEST_LINES = 400, 500  # a test file may be a long table of cases


def sources(*folders: str, root: Path = ROOT) -> list[Path]:
    found = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    assert found, f"no Python files in {folders}"
    return found


def everything() -> list[Path]:
    return sources(*OUR_FOLDERS)


def imports(file: Path, root: Path = ROOT) -> Iterator[str]:
    """Full names of what a file imports, anywhere in it: ``from a import b`` is ``a.b``, relative names in full."""
    folder, *inner = file.relative_to(root).with_suffix("").parts
    module = [*PACKAGES.get(folder, folder).split("."), *inner]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module[: len(module) - node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def rooms_imported(file: Path) -> set[str]:
    """The rooms of fp8_compile that a file imports from."""
    names = [name.split(".") for name in imports(file)]
    return {parts[1] for parts in names if parts[0] == "fp8_compile" and len(parts) > 1 and parts[1] in ROOMS}


def root_of(node: ast.expr) -> ast.expr:
    """What a dotted name starts with."""
    return root_of(node.value) if isinstance(node, ast.Attribute) else node


def private_names(file: Path) -> set[str]:
    """Private parts of other packages that a file names: in imports, in dotted names, as attributes."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Attribute):
            if node.attr in PRIVATE_ATTRIBUTES:
                found.add(node.attr)
            names = [ast.unparse(node)] if isinstance(root_of(node), ast.Name) else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            an_operation = parts[:1] == ["ops"]  # torch.ops.aten._scaled_mm: the dispatcher's names are stable
            if package in OTHERS and not an_operation and any(re.match("_[a-zA-Z]", part) for part in parts):
                found.add(name)
    return found


def imports_back(folder: str, root: Path = ROOT) -> list[str]:
    """Imports of a folder that go the wrong way."""
    wrong = []
    for file in sources(folder, root=root):
        for name in imports(file, root):
            ours = name.split(".")[0] in ("fp8_compile", "passes", "kernels", "tests", "examples", "benchmarks")
            if ours and not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED[folder]):
                wrong.append(f"{file.relative_to(root)} imports {name}")
    return wrong


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_never_go_back(folder: str) -> None:
    assert imports_back(folder) == []


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_one_way(room: str) -> None:
    files = sources(f"fp8_compile/{room}")
    allowed = {room, *ROOMS[room], "torch_internals"}
    assert {str(file): wrong for file in files if (wrong := rooms_imported(file) - allowed)} == {}


def test_every_room_has_its_place_in_the_order() -> None:
    folders = {path.parent.name for path in (ROOT / "fp8_compile").glob("*/__init__.py")}
    assert folders == set(ROOMS)
    reached = {room: set(others) for room, others in ROOMS.items()}
    for _ in ROOMS:
        reached = {room: others.union(*(reached[other] for other in others)) for room, others in reached.items()}
    assert [room for room, others in reached.items() if room in others] == [], "no way leads back"


def test_what_stands_beside_the_rooms_does_not_stand_on_them() -> None:
    files = [file for file in (ROOT / "fp8_compile").glob("*.py") if file.stem not in ON_ROOMS]
    assert {file.name: rooms for file in files if (rooms := rooms_imported(file) - {"torch_internals"})} == {}


@pytest.mark.parametrize("room", ["scaling", "training", "reporting"])
def test_what_is_not_the_backend_imports_words_of_graphs_and_no_pass(room: str) -> None:
    names = {name for file in sources(f"fp8_compile/{room}") for name in imports(file)}
    assert {name for name in names if re.match(r"fp8_compile\.passes\.(?!graph\.)", name)} == set()


def test_private_parts_of_other_packages_are_named_behind_the_wall_alone() -> None:
    files = [file for file in sources(*PACKAGES) if not str(file.relative_to(ROOT)).startswith(BEHIND_THE_WALL)]
    found = {str(file.relative_to(ROOT)): private_names(file) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line, name",
    [
        ("from torch._inductor import ir", "torch._inductor.ir"),
        ("def f():\n    import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._foreach_add_([], 1)", "torch._foreach_add_"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("x = weight._version", "_version"),
    ],
)
def test_a_private_name_would_be_found(tmp_path: Path, line: str, name: str) -> None:
    (tmp_path / "new.py").write_text(line + "\n")
    assert private_names(tmp_path / "new.py") == {name}


def test_operations_are_not_private(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("import torch\nop = torch.ops.aten._scaled_mm.default\nself._x = 1\n")
    assert private_names(tmp_path / "new.py") == set()


def test_the_front_door_imports_no_tests_or_examples() -> None:
    outside = ("tests", "examples", "benchmarks", "passes", "kernels")
    found = [(file.name, name) for file in sources("fp8_compile") for name in imports(file)]
    assert [(file, name) for file, name in found if name.split(".")[0] in outside] == []


@pytest.mark.parametrize(
    "folder, line, name",
    [
        ("kernels", "from fp8_compile.passes.graph.emit import emit", "fp8_compile.passes.graph.emit.emit"),
        ("kernels", "from ..target import Target", "fp8_compile.target.Target"),
        ("kernels", "from .. import passes", "fp8_compile.passes"),
        ("kernels", "import fp8_compile.config", "fp8_compile.config"),
        ("kernels", "def f():\n    from fp8_compile import passes", "fp8_compile.passes"),
        ("passes", "from ..config import Config", "fp8_compile.config.Config"),
        ("passes", "import fp8_compile", "fp8_compile"),
        ("passes", "import kernels.quantize", "kernels.quantize"),
        ("passes", "if TYPE_CHECKING:\n    from ..report import Report", "fp8_compile.report.Report"),
    ],
)
def test_an_import_that_goes_back_would_be_found(tmp_path: Path, folder: str, line: str, name: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "new.py").write_text(line + "\n")
    assert imports_back(folder, tmp_path) == [f"{folder}/new.py imports {name}"]


def test_imports_of_a_neighbour_and_of_what_lies_below_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "passes" / "deep").mkdir(parents=True)
    lines = ["import torch", "from .emit import emit", "from fp8_compile.kernels.formats import E4M3"]
    (tmp_path / "passes" / "new.py").write_text("\n".join([*lines, "from fp8_compile import kernels", ""]))
    (tmp_path / "passes" / "deep" / "new.py").write_text("from ..emit import emit\nfrom ...kernels import quantize\n")
    assert imports_back("passes", tmp_path) == []


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    paths = [path for folder in OUR_FOLDERS for path in (ROOT / folder).rglob("*")]
    assert [str(path) for path in paths if path.stem in vague] == []


def test_no_file_is_too_long() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in everything()}
    most = {file: MOST_TEST_LINES if file.startswith("tests") else MOST_LINES for file in lengths}
    assert {file: length for file, length in lengths.items() if length > most[file]} == {}


def test_every_module_says_what_it_is_about() -> None:
    docstrings = {str(file.relative_to(ROOT)): ast.get_docstring(ast.parse(file.read_text())) for file in everything()}
    assert [file for file, docstring in docstrings.items() if not docstring] == []


def test_every_pass_shows_the_graph_before_and_after() -> None:
    """STYLE.md: the docstring of a pass is the graph before and after."""
    passes = {}
    for file in sources("passes"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "GraphPass" for base in node.bases):
                passes[node.name] = ast.get_docstring(node) or ""
    assert {"RewriteMatmuls", "ShareQuantizes", "LowerQuantizes", "RelayoutBytes"} <= set(passes)
    assert [name for name, text in passes.items() if "Before:" not in text or "After:" not in text] == []


def test_every_source_file_is_in_a_package_that_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {setuptools["package-dir"].get(name, name.replace(".", "/")) for name in setuptools["packages"]}
    assert {str(file.parent.relative_to(ROOT)) for file in sources(*PACKAGES)} == folders


def test_nothing_installs_a_top_level_passes_or_kernels(tmp_path: Path) -> None:
    names = ("passes", "kernels", "fp8_compile")
    code = f"from importlib.util import find_spec; print([bool(find_spec(name)) for name in {names}])"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[False, False, True]"


def test_every_public_name_is_found_and_a_function_stays_one_whoever_imports_its_module() -> None:
    import fp8_compile

    assert sorted(fp8_compile._HOMES) == sorted(fp8_compile.__all__)
    for name, home in fp8_compile._HOMES.items():
        module = importlib.import_module(f"fp8_compile.{home}")
        assert getattr(fp8_compile, name) is getattr(module, name), name
    with pytest.raises(AttributeError, match="has no attribute 'exprot'"):
        fp8_compile.exprot  # noqa: B018
