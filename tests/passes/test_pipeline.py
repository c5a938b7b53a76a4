"""The passes in order, their key in Inductor's cache, and who else is heard."""

from __future__ import annotations

import functools
import logging
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from graph_text import ops
from joint_graph import NO_CACHE, joint_graph, make, split
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from uncompiled import UncompiledBackend
from unnamed import Unnamed

from fp8_compile import Config
from fp8_compile.backend.explain import run_uncompiled
from fp8_compile.backend.graph import compile_graph
from fp8_compile.passes import pipeline
from fp8_compile.passes.graph.update_rule import UpdateRule
from fp8_compile.passes.joint.record_amaxes import RecordAmaxes
from fp8_compile.passes.joint.scale_loss import ScaleLoss
from fp8_compile.passes.pipeline import JointPipeline, SplitPipeline


class Watcher:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []

    def started(self, phase: str, graph: fx.Graph) -> None:
        self.told.append(("started", phase))

    def ran(self, phase: str, pass_name: str, graph: fx.Graph, changed: bool) -> None:
        self.told.append(("ran", phase, pass_name, "changed" if changed else "same"))

    def finished(self, phase: str, graph: fx.Graph) -> None:
        self.told.append(("finished", phase))


def joint(key: str = "key", observer: Watcher | None = None) -> JointPipeline:
    return JointPipeline(make(), Unnamed(), key, observer)


# What runs


@pytest.mark.parametrize("target, lowered", [("cpu", ["LowerScaledMmForCpu"]), ("cuda:90", []), ("hip:gfx942", [])])
def test_the_passes_run_in_order(target: str, lowered: list[str]) -> None:
    made = joint_graph(nn.Linear(32, 32), torch.randn(16, 32))
    watcher = Watcher()
    one = JointPipeline(make(target), made.names, "", watcher)
    assert not one.ran
    one(made.copy())
    assert one.ran and len(one.rows) == 2
    passes = ["RewriteMatmuls", "ShareQuantizes", "NoteGrids", "LowerQuantizes", *lowered]
    assert watcher.told == [
        ("started", "joint"),
        *(("ran", "joint", name, "same" if name == "NoteGrids" else "changed") for name in passes),
        ("finished", "joint"),
    ]


REWRITE = ["RewriteMatmuls", "ShareQuantizes"]
ON_CPU = ["DropRecomputeCopies", "CallCpuKernels", "FuseDelayedQuantizes", "QuantizeInGemm", "DecomposeSingleRow"]
ON_CPU += ["UpdateInPlace"]
ON_GPU = ["LaunchQuantizes", "FuseCasts", "RelayoutBytes", "FlagOverflowInPlace"]


@pytest.mark.parametrize(
    "target, recipe, joint_passes, split_passes",
    [
        ("cpu", "rowwise", [*REWRITE, "LowerQuantizes", "LowerScaledMmForCpu"], ON_CPU),
        ("cuda:90", "tensorwise", [*REWRITE, "LowerQuantizes"], [*ON_GPU, "AddInGemm", "UpdateInPlace"]),
        ("cuda:90", "rowwise", [*REWRITE, "PairQuantizes", "LowerQuantizes"], [*ON_GPU, "AddInGemm", "UpdateInPlace"]),
        (
            "cuda:100",
            "tensorwise",
            [*REWRITE, "LowerQuantizes", "AllowRecompute"],
            ["DropRecomputeCopies", *ON_GPU, "AddInGemm", "UpdateInPlace"],
        ),
        ("hip:gfx942", "tensorwise", [*REWRITE, "LowerQuantizes"], [*ON_GPU, "UpdateInPlace"]),
    ],
)
def test_which_passes_run_follows_from_target_and_recipe(
    target: str, recipe: str, joint_passes: list[str], split_passes: list[str]
) -> None:
    rules = make(target, recipe=recipe)
    last = [] if target == "cpu" else ["SumInQuantizes"]
    assert [one.name for one in JointPipeline(rules, Unnamed(), "").passes] == joint_passes
    assert [one.name for one in SplitPipeline(rules, "").passes] == [*split_passes, *last]


def test_with_a_loss_scale_gradients_are_seen_to_first_and_scaled_before_gemms_are_lowered() -> None:
    one = JointPipeline(make(), Unnamed(), "", scale_loss=ScaleLoss(Unnamed()))
    expected = ["UnscaleNonlinear", *REWRITE, "LowerQuantizes", "ScaleLoss", "LowerScaledMmForCpu"]
    assert [one.name for one in one.passes] == expected


def test_while_amaxes_are_recorded_nothing_is_rewritten() -> None:
    record = RecordAmaxes(make(), Unnamed(), pool=None, rule=UpdateRule())
    for target in ("cpu", "cuda:100"):
        one = JointPipeline(make(target), Unnamed(), "", record=record, scale_loss=ScaleLoss(Unnamed()))
        assert [one.name for one in one.passes] == ["UnscaleNonlinear", "RecordAmaxes", "ScaleLoss"]


def test_a_pass_that_finds_nothing_is_reported_as_such() -> None:
    made = joint_graph(torch.sin, torch.randn(16, 32, requires_grad=True))
    watcher = Watcher()
    JointPipeline(make(), made.names, "", watcher)(made.copy())
    assert {told[-1] for told in watcher.told if told[0] == "ran"} == {"same"}


def test_each_pass_logs_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    made = joint_graph(nn.Linear(32, 32), torch.randn(16, 32))
    with caplog.at_level(logging.DEBUG, logger="fp8_compile.passes"):
        JointPipeline(make(), made.names, "")(made.copy())
    lines = [record.getMessage() for record in caplog.records if record.name == "fp8_compile.passes"]
    assert lines == [
        "joint RewriteMatmuls: 2 of 2 matmuls rewritten",
        "joint ShareQuantizes: 1 quantizes shared",
        "joint NoteGrids: 0 changes: grids noted",
        "joint LowerQuantizes: 3 quantizes lowered",
        "joint LowerScaledMmForCpu: 2 FP8 gemms lowered for the CPU",
    ]


def test_no_dead_node_is_left_behind() -> None:
    made = joint_graph(nn.Linear(32, 32), torch.randn(16, 32, requires_grad=True))
    graph = made.copy()
    JointPipeline(make("cuda:90"), made.names, "")(graph)
    assert [node for node in graph.nodes if node.op == "call_function" and not node.users] == []
    assert not graph.eliminate_dead_code()


def test_a_graph_without_backward_is_called_inference() -> None:
    with torch.no_grad():
        made = joint_graph(nn.Linear(32, 32), torch.randn(16, 32))
    watcher = Watcher()
    JointPipeline(make(), made.names, "", watcher)(made.copy())
    assert {told[1] for told in watcher.told} == {"inference"}


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_forward_and_backward_are_called_by_their_names(target: str) -> None:
    made = split(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32)), torch.randn(16, 32), target=target)
    one = SplitPipeline(make(target), "")
    assert (one.phase(made.forward), one.phase(made.backward)) == ("forward", "backward")


def test_a_forward_graph_that_prepares_something_for_backward_is_called_forward() -> None:
    made = split(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), torch.randn(16, 32), target="cpu")
    assert SplitPipeline(make(), "").phase(made.forward) == "forward"


def test_the_backward_of_a_lone_product_is_called_backward() -> None:
    """All of its matmuls are nodes of ours, which carry no tag of the partitioner."""
    x, w = torch.randn(16, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    made = split(torch.mm, x, w, target="cpu")
    assert SplitPipeline(make(), "").phase(made.backward) == "backward"


def test_rows_of_every_graph_that_was_rewritten_are_kept() -> None:
    """torch.cond: Inductor runs the pipeline on each branch first, then on the graph around them."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes, self.no, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cond(x.sum() > 0, lambda x: self.yes(x), lambda x: self.no(x), (x,)))

    backend = UncompiledBackend()
    with torch.no_grad():
        torch.compile(Either(), backend=backend)(torch.randn(16, 32))
    assert len(backend.reports[0].rows) == 3


# The key


def test_equal_keys_give_equal_ids_and_others_give_others() -> None:
    assert joint("a").uuid() == joint("a").uuid()
    assert joint("a").uuid() != joint("b").uuid()
    assert joint("a").uuid() != SplitPipeline(make(), "a").uuid()
    assert len(joint("a").uuid()) == 64


def test_with_an_observer_there_is_no_id_so_that_passes_run() -> None:
    assert joint("a", Watcher()).uuid() is None
    assert SplitPipeline(make(), "a", Watcher()).uuid() is None


@pytest.fixture
def copied_sources(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """``source_hash`` reads a copy of all sources."""
    root = pathlib.Path(pipeline.__file__).parent.parent
    folders = ("fp8_compile", "passes", "kernels")
    for folder in folders:
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(pipeline, "FOLDERS", [tmp_path / folder for folder in folders])
    return tmp_path


def fresh_hash() -> str:
    get_hash_for_files.cache_clear()
    return pipeline.source_hash()


SOURCES = ["fp8_compile/config.py", "fp8_compile/cli/machine.py", "passes/joint/decide.py", "kernels/cpu/gemm.h"]


def test_the_id_covers_every_folder_that_is_installed() -> None:
    root = pathlib.Path(pipeline.__file__).parent.parent
    assert set(pipeline.FOLDERS) == {root / folder for folder in ("fp8_compile", "passes", "kernels")}


@pytest.mark.parametrize("file", SOURCES)
def test_another_source_gives_another_id(copied_sources: pathlib.Path, file: str) -> None:
    before = fresh_hash()
    assert fresh_hash() == before
    with open(copied_sources / file, "a") as source:
        source.write("# changed\n")
    assert fresh_hash() != before


@pytest.mark.parametrize("folder", ["passes", "fp8_compile/a_new_room", "kernels/gpu"])
def test_a_new_source_gives_another_id(copied_sources: pathlib.Path, folder: str) -> None:
    before = fresh_hash()
    (copied_sources / folder).mkdir(exist_ok=True)
    (copied_sources / folder / "new.py").write_text('"""New."""\n')
    assert fresh_hash() != before


def uuids(model: nn.Module | None = None, **options: Any) -> tuple[str, str]:
    """The ids with which Inductor would look up ``model`` in its cache: of the joint and of the split passes."""
    seen: list[str] = []

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        for field in ("joint_custom_pre_pass", "post_grad_custom_pre_pass"):
            (ours,) = [one for one in getattr(inductor_config, field) if isinstance(one, pipeline.Pipeline)]
            seen.append(ours.uuid())
        return run_uncompiled(gm, example_inputs)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, Config(**options, inductor=NO_CACHE), inner_compile=inner)[0]

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model or layers(), backend=backend)(torch.zeros(16, 32))
    joint_id, split_id = seen
    return joint_id, split_id


@functools.cache
def plain_uuids() -> tuple[str, str]:
    return uuids()


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def test_the_backend_gives_equal_models_equal_ids() -> None:
    assert uuids() == plain_uuids()


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "rowwise"},
        {"exclude": ("0",)},
        {"min_dim": 33},
        {"target": "cuda:90"},
        {"quantize_gradients": False},
        {"backward_format": "e4m3"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_config_gives_other_ids(options: dict[str, Any]) -> None:
    plain, other = plain_uuids(), uuids(**options)
    assert plain[0] != other[0] and plain[1] != other[1]


def test_other_names_of_modules_without_parameters_give_other_ids() -> None:
    """Such a name is in no name of the graph, only in what nodes say of themselves; yet it may be excluded."""

    class Product(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return x @ w

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 32))
            self.add_module(name, Product())

        def forward(self, x: Tensor) -> Tensor:
            return next(self.children())(x, self.w)

    assert uuids(Named("gate"))[0] == uuids(Named("gate"))[0]
    assert uuids(Named("gate"))[0] != uuids(Named("router"))[0]


# The user's own passes


@pytest.mark.parametrize("where", ["config of the backend", "config of Inductor"])
@pytest.mark.parametrize("several", [False, True])
def test_passes_of_the_user_are_kept_and_run_before_ours(where: str, several: bool) -> None:
    seen: list[dict[str, int]] = []

    class Users(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(ops(graph))

        def uuid(self) -> str:
            return "the user's"

    theirs: Any = [Users(), Users()] if several else Users()
    fields = {"joint_custom_pre_pass": theirs}
    x = torch.randn(16, 32)
    if where == "config of Inductor":
        with inductor_config.patch(fields), torch.no_grad():
            backend = UncompiledBackend()
            torch.compile(layers(), backend=backend)(x)
    else:
        backend = UncompiledBackend(Config(inductor=fields))
        with torch.no_grad():
            torch.compile(layers(), backend=backend)(x)
    assert len(seen) == (2 if several else 1)
    assert all("addmm" in graph and "_scaled_mm" not in graph for graph in seen)
    assert len(backend.reports[0].rewritten) == 2


def test_post_grad_passes_of_the_user_are_kept_before_ours() -> None:
    def theirs(graph: fx.Graph) -> None: ...

    seen: list[Any] = []

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        seen.extend(inductor_config.post_grad_custom_pre_pass)
        return run_uncompiled(gm, example_inputs)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, Config(inductor=NO_CACHE), inner_compile=inner)[0]

    with inductor_config.patch(post_grad_custom_pre_pass=theirs), torch.no_grad():
        torch.compile(layers(), backend=backend)(torch.randn(16, 32))
    assert [type(one).__name__ for one in seen] == ["function", "SplitPipeline"]
    assert seen[0] is theirs
