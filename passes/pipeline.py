"""The passes in order, as Inductor runs them: ``JointPipeline`` before the graph is split into forward and
backward, ``SplitPipeline`` on each half. Each is one list of steps: a pass, and when it runs."""

from __future__ import annotations

import hashlib
import logging
import pathlib
import sys
from typing import Callable, Mapping, Protocol, Sequence

from torch import fx

import fp8_compile.kernels.inductor  # noqa: F401  Inductor learns our operations
from fp8_compile.torch_internals import patches
from fp8_compile.torch_internals.aot import name_inputs
from fp8_compile.torch_internals.custom_pass import CustomGraphPass
from fp8_compile.torch_internals.graphs import remove_dead_nodes
from fp8_compile.torch_internals.inductor import hash_of_files

from . import invariants
from .graph.cached_weights import CachedWeights
from .graph.roles import is_backward
from .graph.row import Row
from .graph.rules import Rules
from .graph.weight_grid import WeightGrid
from .graph_pass import GraphPass
from .joint.allow_recompute import AllowRecompute
from .joint.delay_scales import DelayScales
from .joint.draw_seeds import DrawSeeds
from .joint.lower_quantizes import LowerQuantizes
from .joint.lower_scaled_mm_cpu import LowerScaledMmForCpu
from .joint.multiply_packed import MultiplyPacked, StackNames
from .joint.note_grids import NoteGrids
from .joint.pair_mx import PairMx
from .joint.pair_nvfp4 import PairNvfp4
from .joint.pair_quantizes import PairQuantizes
from .joint.read_fp8_cache import ReadFp8Cache
from .joint.record_amaxes import RecordAmaxes
from .joint.rewrite_matmuls import RewriteMatmuls
from .joint.scale_loss import ScaleLoss
from .joint.share_quantizes import ShareQuantizes
from .joint.unscale_nonlinear import UnscaleNonlinear
from .joint.use_weight_cache import UseWeightCache
from .split.add_in_gemm import AddInGemm
from .split.ask_for_rowwise import AskForRowwise
from .split.call_cpu_kernels import CallCpuKernels
from .split.decompose_single_row import DecomposeSingleRow
from .split.drop_recompute_copies import DropRecomputeCopies
from .split.flag_overflow_in_place import FlagOverflowInPlace
from .split.fuse_casts import FuseCasts
from .split.fuse_delayed_quantizes import FuseDelayedQuantizes
from .split.launch_quantizes import LaunchQuantizes
from .split.quantize_in_gemm import QuantizeInGemm
from .split.relayout_bytes import RelayoutBytes
from .split.stack_alphas import StackAlphas
from .split.sum_in_quantizes import SumInQuantizes
from .split.update_in_place import UpdateInPlace

log = logging.getLogger("fp8_compile.passes")


# Every folder that decides what code is made: side by side in the repository, one inside the other when installed.
PACKAGES = ("fp8_compile", "fp8_compile.passes", "fp8_compile.kernels")
FOLDERS = [pathlib.Path(sys.modules[name].__path__[0]) for name in PACKAGES]


def source_hash() -> str:
    """A hash of every source file of the package: other code has other cache entries."""
    kinds = ("*.py", "*.cpp", "*.h")
    files = sorted({str(file) for folder in FOLDERS for kind in kinds for file in folder.rglob(kind)})
    return hash_of_files(files)


# Computed on import: what a file says that is edited later must not be in the key of code made by the old one.
SOURCE_HASH = source_hash()


# Passes that run right after the split: what Inductor does to every node then, it does to fewer of them.
SHRINKING = (DropRecomputeCopies, CallCpuKernels, FuseDelayedQuantizes, QuantizeInGemm)


# A pass, and when it runs: always, never, or on which graphs. None in the place of a pass: there is none.
Step = tuple[GraphPass | None, bool | Callable[[fx.Graph], bool]]


class Observer(Protocol):
    """Who watches the passes; the dump does."""

    def started(self, phase: str, graph: fx.Graph) -> None: ...

    def ran(self, phase: str, pass_name: str, graph: fx.Graph, changed: bool) -> None: ...

    def finished(self, phase: str, graph: fx.Graph) -> None: ...


class Pipeline(CustomGraphPass):
    """Runs passes one after the other and tells what each did.

    ``key`` stands for everything the passes do that is not seen in the graph: config, names, decisions. With our
    sources it is the part of Inductor's cache key that we answer for. While dumping there is no key, because
    passes do not run on a cache hit and nothing would be written.
    """

    def __init__(self, steps: Sequence[GraphPass | Step], key: str, observer: Observer | None) -> None:
        pairs = [step if isinstance(step, tuple) else (step, True) for step in steps]
        self.steps = [(one, when) for one, when in pairs if one is not None and when is not False]
        self.key, self.observer = key, observer

    @property
    def passes(self) -> list[GraphPass]:
        """The passes that run whatever the graph is."""
        return [one for one, when in self.steps if when is True]

    def __call__(self, graph: fx.Graph) -> None:
        self._run(self.steps, graph)

    def _run(self, steps: Sequence[tuple[GraphPass, bool | Callable[[fx.Graph], bool]]], graph: fx.Graph) -> None:
        phase = self.phase(graph)
        checked, gone = invariants.are_checked(), set[object]()
        if self.observer:
            self.observer.started(phase, graph)
        for one in [one for one, when in steps if when is True or (callable(when) and when(graph))]:
            report = one.run(graph)
            log.debug("%s %s: %s", phase, one.name, report)
            if report.changes:
                remove_dead_nodes(graph)
            if checked:
                graph.lint()
                gone.update(one.leaves_no)
                invariants.check_graph(graph, one.name, gone)
            if self.observer:
                self.observer.ran(phase, one.name, graph, bool(report.changes))
        if self.observer:
            self.observer.finished(phase, graph)

    def phase(self, graph: fx.Graph) -> str:
        """What the graph is called in logs and dumps."""
        raise NotImplementedError

    def uuid(self) -> str | None:
        if self.observer:
            return None
        known = f"{type(self).__name__}{SOURCE_HASH}{patches.left_out()}{self.key}"
        return hashlib.sha256(known.encode()).hexdigest()


class JointPipeline(Pipeline):
    """The passes on forward and backward together. ``inputs``: the names of arguments that the backend has added.
    ``record``: the graph only records amaxes, nothing is rewritten."""

    def __init__(
        self,
        rules: Rules,
        names: StackNames,
        key: str,
        observer: Observer | None = None,
        *,
        inputs: Mapping[int, str] | None = None,
        delay: DelayScales | None = None,
        weights: CachedWeights | None = None,
        record: RecordAmaxes | None = None,
        scale_loss: ScaleLoss | None = None,
        strict: bool = True,
    ) -> None:
        self.packed = MultiplyPacked(names, rules.target)
        self.rewrite = RewriteMatmuls(rules, names, strict=strict)
        self.noted = NoteGrids(rules)
        self.ran, self.inputs = False, inputs or {}
        rewrites, on_cpu = record is None, rules.target == "cpu"
        many_scales = rules.recipe in ("rowwise", "blockwise") and rules.block_scaled is None
        calls = on_cpu and patches.active("cheap_ops")
        copies, blocks = not rules.reads_any_layout, None if on_cpu else rules.block_scaled
        # fmt: off
        steps: list[Step] = [
            (self.packed,                                     self.packed.applies),   # packed weights are in the graph
            (ReadFp8Cache() if on_cpu else None,              ReadFp8Cache.applies),   # a cache in FP8 is
            (UnscaleNonlinear(),                              scale_loss is not None),
            (record,                                          not rewrites),
            (self.rewrite,                                    rewrites),
            (ShareQuantizes(),                                rewrites),
            (self.noted,                                      rewrites and self.noted.applies),
            (UseWeightCache(weights) if weights else None,    rewrites),
            (delay,                                           rewrites),
            (DrawSeeds(),                                     rewrites and rules.block_scaled == "nvfp4"),
            (PairQuantizes(),                                 rewrites and many_scales and not on_cpu),
            (PairMx(needs_k_contiguous=copies),               rewrites and blocks == "mxfp8"),
            (PairNvfp4(),                                     rewrites and blocks == "nvfp4"),
            (LowerQuantizes(rules.target, calls=calls),       rewrites),
            (scale_loss,                                      True),
            (LowerScaledMmForCpu(),                           rewrites and on_cpu),
            (AllowRecompute(),                                rewrites and rules.reads_any_layout),
        ]
        # fmt: on
        super().__init__(steps, key, observer)

    @property
    def rows(self) -> list[Row]:
        return [*self.packed.rows, *self.rewrite.rows]

    @property
    def grids(self) -> list[WeightGrid]:
        """How forward quantizes the weights that it multiplies by."""
        return self.noted.grids

    def only_decide(self, graph: fx.Graph) -> None:
        """The passes up to the one that decides: ``rows`` is complete then. A dump gets to see all of them."""
        deciding = next((index for index, (one, _) in enumerate(self.steps) if one is self.rewrite), len(self.steps))
        self._run(self.steps if self.observer else self.steps[: deciding + 1], graph)

    def _run(self, steps: Sequence[tuple[GraphPass, bool | Callable[[fx.Graph], bool]]], graph: fx.Graph) -> None:
        self.ran = True
        name_inputs(graph, self.inputs)
        super()._run(steps, graph)

    def phase(self, graph: fx.Graph) -> str:
        return "joint" if any(is_backward(node) for node in graph.nodes) else "inference"


class SplitPipeline(Pipeline):
    """The passes on each half, for what is better done when it is known which tensors are saved for backward."""

    def __init__(self, rules: Rules, key: str, observer: Observer | None = None) -> None:
        on_cpu, on_nvidia = rules.target == "cpu", rules.target.startswith("cuda")
        # fmt: off
        steps: list[Step] = [
            (DropRecomputeCopies(),     on_cpu or rules.reads_any_layout or rules.block_scaled is not None),
            (CallCpuKernels(),          on_cpu),
            (FuseDelayedQuantizes(),    on_cpu),
            (QuantizeInGemm(),          on_cpu),
            (DecomposeSingleRow(),      on_cpu),
            (LaunchQuantizes(),         not on_cpu),
            (FuseCasts(),               not on_cpu),
            (RelayoutBytes(),           not on_cpu),
            (FlagOverflowInPlace(),     not on_cpu and patches.active("atomic_max")),
            (AddInGemm(),               on_nvidia),
            (AskForRowwise(),           rules.recipe == "rowwise" and rules.target.startswith("cuda:12")),
            (StackAlphas(),             not on_cpu and rules.recipe == "nvfp4"),
            (UpdateInPlace(),           True),
            (SumInQuantizes(),          not on_cpu and patches.active("tile_sum")),
        ]
        # fmt: on
        super().__init__(steps, key, observer)
        self.shrinking = [step for step in self.steps if isinstance(step[0], SHRINKING)] if on_cpu else []

    def shrink(self, graph: fx.Graph) -> None:
        """Run the passes that make few nodes of many. They change nothing when they run again in their turn."""
        self._run(self.shrinking, graph)

    def phase(self, graph: fx.Graph) -> str:
        # Not by the nodes' tags: forward saves values, such as the mask of a relu, that were traced for backward.
        gradients = (node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
        return "backward" if any(gradients) else "forward"
