"""The files of a compiled graph: which, what is in them, and what happens when the disk fails."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expecttest
import networkx as nx
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp8_compile.passes.graph.row import Row
from fp8_compile.report import Report
from fp8_compile.reporting.dump import GraphDump, readable
from fp8_compile.reporting.precision_graph import to_networkx

aten = torch.ops.aten
NOBODY = 65534


@pytest.fixture
def warnings_logged() -> Iterator[list[str]]:
    """What our logger warned of; a handler of our own, because torch's logging may stop records on their way up."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fp8_compile")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(torch.relu(x @ w).sum(), [x, w])


def traced_step() -> fx.Graph:
    inputs = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(16, 48, dtype=torch.bfloat16)
    return make_fx(step, tracing_mode="fake")(*(tensor.requires_grad_() for tensor in inputs)).graph


def product() -> fx.Graph:
    """y = relu(x @ w), not owned by a module."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    y = graph.call_function(aten.mm.default, (x, w))
    z = graph.call_function(aten.relu.default, (y,))
    graph.output((z,))
    shapes = {x: (8, 16), w: (16, 48), y: (8, 48), z: (8, 48)}
    for node, shape in shapes.items():
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return graph


def replace(graph: fx.Graph, old: object, new: object) -> None:
    """A pass: each ``old`` operation becomes ``new``."""
    for node in graph.find_nodes(op="call_function", target=old):
        node.target = new


def report() -> Report:
    rows = (
        Row("blocks.0.up", "output", (8, 48, 16), "rewritten", "both operands in FP8", formats=("e4m3", "e4m3")),
        Row("tête \ud800", "grad_input", ("s0", 16, 48), "skipped", "excluded"),
    )
    return Report(rows, "tensorwise", "cpu")


def files(dump: GraphDump) -> list[str]:
    return sorted(os.listdir(dump.path))


def test_one_graph_has_the_files_of_its_whole_story(tmp_path: Path) -> None:
    dump, graph = GraphDump.create(tmp_path), product()
    dump.started("joint", graph)
    dump.ran("joint", "FindMatmuls", graph, changed=False)
    replace(graph, aten.relu.default, aten.neg.default)
    dump.ran("joint", "RewriteMatmuls", graph, changed=True)
    dump.ran("joint", "ShareQuantizes", graph, changed=False)
    replace(graph, aten.neg.default, aten.exp.default)
    dump.ran("joint", "lower_for_cpu", graph, changed=True)
    dump.finished("joint", graph)
    dump.write_report(report())
    assert dump.path == tmp_path / "graph_000"
    assert files(dump) == [
        "graphs.json",
        "joint.00_before.py",
        "joint.01_rewrite_matmuls.diff",
        "joint.01_rewrite_matmuls.py",
        "joint.02_lower_for_cpu.diff",
        "joint.02_lower_for_cpu.py",
        "joint.before.dot",
        "joint.before.graphml",
        "joint.dot",
        "joint.graphml",
        "report.html",
        "report.json",
        "report.txt",
    ]


def test_the_readable_graph_shows_dtypes_shapes_and_strides() -> None:
    graph = product()
    assert graph.owning_module is None
    expecttest.assert_expected_inline(
        readable(graph),
        """\
class GraphModule(torch.nn.Module):
    def forward(self, x: "bf16[8, 16][16, 1]", w: "bf16[16, 48][48, 1]"):
        # No stacktrace found for following nodes
        mm_default: "bf16[8, 48][48, 1]" = torch.ops.aten.mm.default(x, w);  x = w = None
        relu_default: "bf16[8, 48][48, 1]" = torch.ops.aten.relu.default(mm_default);  mm_default = None
        return (relu_default,)
""",
    )


def test_an_owned_graph_reads_as_torch_prints_it() -> None:
    graph = traced_step()
    printed = graph.owning_module.print_readable(print_output=False, include_stride=True)
    assert readable(graph).rstrip() == printed.rstrip()
    assert readable(graph).count("torch.ops.aten.mm.default(") == 3


def test_a_graph_that_left_its_module_is_the_one_that_is_written() -> None:
    graph = traced_step()
    owner = graph.owning_module
    replaced = copy.deepcopy(graph)
    replaced.owning_module = owner
    replace(replaced, aten.relu.default, aten.neg.default)
    assert "aten.neg.default" in readable(replaced) and "aten.relu.default" not in readable(replaced)


def test_the_diff_shows_what_this_pass_changed_and_nothing_of_the_one_before(tmp_path: Path) -> None:
    dump, graph = GraphDump.create(tmp_path), product()
    dump.started("joint", graph)
    replace(graph, aten.relu.default, aten.neg.default)
    dump.ran("joint", "Negate", graph, changed=True)
    replace(graph, aten.mm.default, aten.matmul.default)
    dump.ran("joint", "Multiply", graph, changed=True)
    expecttest.assert_expected_inline(
        (dump.path / "joint.02_multiply.diff").read_text(),
        """\
--- joint.01_negate.py
+++ joint.02_multiply.py
@@ -1,6 +1,6 @@
 class GraphModule(torch.nn.Module):
     def forward(self, x: "bf16[8, 16][16, 1]", w: "bf16[16, 48][48, 1]"):
         # No stacktrace found for following nodes
-        mm_default: "bf16[8, 48][48, 1]" = torch.ops.aten.mm.default(x, w);  x = w = None
+        mm_default: "bf16[8, 48][48, 1]" = torch.ops.aten.matmul.default(x, w);  x = w = None
         relu_default: "bf16[8, 48][48, 1]" = torch.ops.aten.neg.default(mm_default);  mm_default = None
         return (relu_default,)
""",
    )


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the patch command")
def test_the_diffs_applied_in_turn_lead_from_the_first_graph_to_the_last(tmp_path: Path) -> None:
    dump, graph = GraphDump.create(tmp_path), traced_step()
    dump.started("joint", graph)
    for old, new in ((aten.mm.default, aten.matmul.default), (aten.relu.default, aten.neg.default)):
        replace(graph, old, new)
        dump.ran("joint", f"to {new}", graph, changed=True)
    patched = tmp_path / "patched.py"
    patched.write_bytes((dump.path / "joint.00_before.py").read_bytes())
    for diff in sorted(dump.path.glob("*.diff")):
        subprocess.run(["patch", "--silent", patched, diff], check=True)
    last = (dump.path / "joint.02_to_aten_neg_default.py").read_text()
    assert patched.read_text() == last and "aten.neg.default" in last


def test_phases_are_numbered_and_compared_each_on_their_own(tmp_path: Path) -> None:
    dump, forward, backward = GraphDump.create(tmp_path), product(), traced_step()
    dump.started("forward", forward)
    dump.started("backward", backward)
    for phase, graph in (("forward", forward), ("backward", backward)):
        replace(graph, aten.relu.default, aten.neg.default)
        dump.ran(phase, "Negate", graph, changed=True)
    assert {"forward.01_negate.diff", "backward.01_negate.diff"} <= set(files(dump))
    for phase in ("forward", "backward"):
        changed = (dump.path / f"{phase}.01_negate.diff").read_text().splitlines()[2:]
        assert [line[0] for line in changed if line[0] in "+-"] == ["-", "+"]


def test_the_drawn_graphs_are_the_first_and_the_last(tmp_path: Path) -> None:
    dump, graph = GraphDump.create(tmp_path), traced_step()
    before = to_networkx(graph)
    dump.started("joint", graph)
    replace(graph, aten.relu.default, aten.neg.default)
    dump.ran("joint", "Negate", graph, changed=True)
    dump.finished("joint", graph)
    for stem, expected in (("joint.before", before), ("joint", to_networkx(graph))):
        read = nx.read_graphml(dump.path / f"{stem}.graphml")
        assert dict(read.nodes(data=True)) == dict(expected.nodes(data=True))
        assert set(read.edges) == set(expected.edges)
    assert "aten.relu.default" in (dump.path / "joint.before.dot").read_text()
    assert "aten.relu.default" not in (dump.path / "joint.dot").read_text()


def test_the_report_is_json_that_reads_back_and_a_table(tmp_path: Path) -> None:
    dump = GraphDump.create(tmp_path)
    dump.write_report(report())
    assert Report.from_dict(json.loads((dump.path / "report.json").read_text())) == report()
    assert (dump.path / "report.json").read_text().startswith('{\n  "recipe": "tensorwise",\n')
    table = (dump.path / "report.txt").read_text(encoding="utf-8")
    assert "blocks.0.up" in table and "tête \\ud800" in table and "rewrote 1 of 2 matmuls" in table


@pytest.mark.parametrize(
    ("pass_name", "stem"),
    [
        ("RewriteMatmuls", "rewrite_matmuls"),
        ("rewrite_matmuls", "rewrite_matmuls"),
        ("LowerFP8ForCPU", "lower_fp8_for_cpu"),
        ("../../etc/passwd", "etc_passwd"),
        ('a"b\n<script>', "a_b_script"),
        ("数\x00", "pass"),
        ("Long" * 200, ("long_" * 16)[:80]),
    ],
)
def test_a_pass_name_becomes_a_tame_file_name(pass_name: str, stem: str, tmp_path: Path) -> None:
    dump, graph = GraphDump.create(tmp_path), product()
    dump.started("joint", graph)
    dump.ran("joint", pass_name, graph, changed=True)
    assert sorted(path.name for path in dump.path.glob("joint.01*")) == [f"joint.01_{stem}.diff", f"joint.01_{stem}.py"]
    assert os.listdir(tmp_path) == ["graph_000"]


def test_a_graph_with_hostile_names_is_dumped_whole(tmp_path: Path, warnings_logged: list[str]) -> None:
    dump, graph = GraphDump.create(tmp_path), product()
    hostile = 'x"<script>\x00\n\ud800'
    x = next(iter(graph.nodes))
    x.name = x.target = hostile
    dump.started("inference", graph)
    replace(graph, aten.relu.default, aten.neg.default)
    dump.ran("inference", "Negate", graph, changed=True)
    dump.finished("inference", graph)
    assert warnings_logged == [] and len(files(dump)) == 7
    read = nx.read_graphml(dump.path / "inference.graphml")
    assert list(read.nodes)[0] == 'x"<script>\\x00\\n\\ud800'


def test_each_graph_gets_the_next_folder_and_a_taken_name_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    assert GraphDump.create(folder).path == folder / "graph_000"
    (folder / "graph_001").write_text("a file of the user's")
    assert GraphDump.create(str(folder)).path == folder / "graph_002"
    assert (folder / "graph_001").read_text() == "a file of the user's"


def test_the_folder_stays_where_it_was_when_the_script_changes_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dump = GraphDump.create("dumps")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    dump.write_report(report())
    assert (tmp_path / "dumps" / "graph_000" / "report.json").exists()


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert GraphDump.create("~/dumps").path == tmp_path / "dumps" / "graph_000"


def test_two_processes_at_once_never_share_a_folder(tmp_path: Path) -> None:
    # Forked, they import torch once; the closed end of a pipe is what both wait for.
    script = (
        "import os, sys; from fp8_compile.reporting.dump import GraphDump\n"
        "start, go = os.pipe()\n"
        "forked = os.fork()\n"
        "os.close(go), os.read(start, 1)\n"
        "names = [GraphDump.create(sys.argv[1]).path.name for _ in range(200)]\n"
        "assert not forked or os.waitpid(forked, 0)[1] == 0\n"
        "print(*names)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert sorted(names) == [f"graph_{number:03d}" for number in range(400)]


def test_threads_at_once_never_share_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda _: GraphDump.create(tmp_path).path.name, range(200)))
    assert sorted(names) == [f"graph_{number:03d}" for number in range(200)]


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Root writes everywhere, so permissions mean something only to somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("inside", ["", "new/folder"])
def test_a_read_only_folder_is_an_error_that_names_it_and_the_remedy(inside: str) -> None:
    # Not tmp_path: its parents are closed to others, and the error would be about them.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        with without_root(), pytest.raises(ValueError, match="FP8_COMPILE_DUMP") as caught:
            GraphDump.create(Path(name) / inside)
        assert str(Path(name) / inside) in str(caught.value) and "Permission denied" in str(caught.value)
        assert os.listdir(name) == []


@pytest.mark.parametrize("name", ["taken", "taken/inside", "null\x00byte", "x" * 300])
def test_a_path_that_cannot_be_a_folder_is_an_error_that_names_it_and_the_remedy(name: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ValueError, match="cannot write dumps to .*Give a folder that can be written") as caught:
        GraphDump.create(tmp_path / name)
    assert repr(str(tmp_path / name)) in str(caught.value)


def test_a_folder_deleted_in_the_middle_is_one_warning_and_then_silence(
    tmp_path: Path, warnings_logged: list[str]
) -> None:
    dump, graph = GraphDump.create(tmp_path), product()
    dump.started("joint", graph)
    shutil.rmtree(dump.path)
    dump.ran("joint", "RewriteMatmuls", graph, changed=True)
    dump.path.mkdir()  # even when it is back: half a story is worse than a short one
    dump.ran("joint", "LowerForCpu", graph, changed=True)
    dump.finished("joint", graph)
    dump.started("backward", graph)
    dump.ran("backward", "RewriteMatmuls", graph, changed=True)
    dump.write_report(report())
    assert len(warnings_logged) == 1
    assert str(dump.path / "joint.01_rewrite_matmuls.py") in warnings_logged[0]
    assert files(dump) == []


def test_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_the_whole_old_one(
    tmp_path: Path, warnings_logged: list[str]
) -> None:
    dump, graph = GraphDump.create(tmp_path), traced_step()
    dump.started("joint", graph)
    dump.finished("joint", graph)
    before = {name: (dump.path / name).read_bytes() for name in files(dump)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel cuts the file off in the middle; Python ignores the signal that goes with it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before["joint.graphml"]) // 2, hard))
    try:
        dump.finished("joint", graph)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {name: (dump.path / name).read_bytes() for name in files(dump)} == before
    assert len(warnings_logged) == 1 and str(dump.path / "joint.graphml") in warnings_logged[0]
    assert os.strerror(errno.EFBIG) in warnings_logged[0]


def test_a_mistake_of_ours_is_not_taken_for_a_disk_error(tmp_path: Path) -> None:
    dump, graph = GraphDump.create(tmp_path), product()
    with pytest.raises(KeyError, match="joint"):
        dump.ran("joint", "RewriteMatmuls", graph, changed=True)  # never started
    graph.output_node().prepend(next(iter(graph.nodes)))  # used before it is defined
    with pytest.raises(KeyError, match="x"):
        dump.finished("joint", graph)


def test_a_dump_can_be_copied_and_pickled_with_the_pass_that_holds_it(tmp_path: Path) -> None:
    dump, graph = GraphDump.create(tmp_path), product()
    dump.started("joint", graph)
    copies = copy.deepcopy(dump), pickle.loads(pickle.dumps(dump))
    replace(graph, aten.relu.default, aten.neg.default)
    for copied, name in zip(copies, ("deep", "pickled"), strict=True):
        copied.ran("joint", name, graph, changed=True)
        diff = (dump.path / f"joint.01_{name}.diff").read_text().splitlines()[2:]
        removed, added = (line for line in diff if line[0] in "-+")
        assert "aten.relu.default" in removed and "aten.neg.default" in added
