"""The passes in order, as Inductor runs them: ``JointPipeline`` before the graph is split into forward and
backward, ``SplitPipeline`` on each half."""

from __future__ import annotations

import hashlib
import logging
import pathlib
import sys
from typing import Protocol, Sequence

from torch import fx

import fp8_compile.kernels.inductor  # noqa: F401  Inductor learns our operations
from fp8_compile.torch_internals import patches
from fp8_compile.torch_internals.custom_pass import CustomGraphPass
from fp8_compile.torch_internals.inductor import hash_of_files

from .graph.roles import is_backward
from .graph.row import Row
from .graph_pass import GraphPass
from .joint.allow_recompute import ForgetCopies, ReadAgain
from .joint.decide import Rules
from .joint.delay_scales import DelayScales
from .joint.lower_quantizes import LowerQuantizes
from .joint.lower_scaled_mm_cpu import LowerScaledMmForCpu
from .joint.multiply_experts import MultiplyExperts, StackNames
from .joint.multiply_packed import MultiplyPacked
from .joint.pair_quantizes import PairQuantizes
from .joint.record_amaxes import RecordAmaxes
from .joint.rewrite_matmuls import RewriteMatmuls
from .joint.scale_loss import ScaleLoss
from .joint.share_quantizes import ShareQuantizes
from .joint.unscale_nonlinear import UnscaleNonlinear
from .joint.use_weight_cache import CachedWeights, UseWeightCache
from .split.add_in_gemm import AddInGemm
from .split.call_cpu_kernels import CallCpuKernels
from .split.decompose_single_row import OpenOneRow
from .split.flag_overflow_in_place import FlagOverflowInPlace
from .split.fuse_casts import FuseCasts
from .split.fuse_delayed_quantizes import FuseDelayedQuantizes
from .split.launch_quantizes import LaunchQuantizes
from .split.relayout_bytes import RelayoutBytes
from .split.sum_in_quantizes import SumInQuantizes
from .split.update_in_place import UpdateInPlace

log = logging.getLogger("fp8_compile.passes")


# Every folder that decides what code is made: side by side in the repository, one inside the other when installed.
PACKAGES = ("fp8_compile", "fp8_compile.passes", "fp8_compile.kernels")
FOLDERS = [pathlib.Path(sys.modules[name].__path__[0]) for name in PACKAGES]


def source_hash() -> str:
    """A hash of every source file of the package, in whichever room: other code, other cache entries."""
    kinds = ("*.py", "*.cpp", "*.h")
    files = sorted({str(file) for folder in FOLDERS for kind in kinds for file in folder.rglob(kind)})
    return hash_of_files(files)


# When imported: a file edited later must not lend its name to code made by the old one.
SOURCE_HASH = source_hash()


class Observer(Protocol):
    """Who watches the passes: the dump does."""

    def started(self, phase: str, graph: fx.Graph) -> None: ...

    def ran(self, phase: str, pass_name: str, graph: fx.Graph, changed: bool) -> None: ...

    def finished(self, phase: str, graph: fx.Graph) -> None: ...


class Pipeline(CustomGraphPass):
    """Runs passes one after the other and tells what each did.

    ``key`` stands for everything the passes do that is not seen in the graph: config, names, decisions. With our
    sources it is the part of Inductor's cache key that we answer for. While dumping there is no key, because
    passes do not run on a cache hit and nothing would be written.
    """

    def __init__(self, passes: Sequence[GraphPass], key: str, observer: Observer | None) -> None:
        self.passes, self.key, self.observer = list(passes), key, observer

    def __call__(self, graph: fx.Graph) -> None:
        phase = self.phase(graph)
        if self.observer:
            self.observer.started(phase, graph)
        for one in self.passes:
            report = one.run(graph)
            log.debug("%s %s: %s", phase, one.name, report)
            if report.changes:
                graph.eliminate_dead_code()
                graph.lint()
            if self.observer:
                self.observer.ran(phase, one.name, graph, bool(report.changes))
        if self.observer:
            self.observer.finished(phase, graph)

    def phase(self, graph: fx.Graph) -> str:
        raise NotImplementedError

    def uuid(self) -> str | None:
        if self.observer:
            return None
        known = f"{type(self).__name__}{SOURCE_HASH}{patches.left_out()}{self.key}"
        return hashlib.sha256(known.encode()).hexdigest()


class JointPipeline(Pipeline):
    """multiply packed weights and experts, where there are any -> find matmuls, decide, rewrite -> share quantizes ->
    use cached weights -> delay scales -> pair quantizes -> lower quantizes -> scale the loss -> lower for the target.
    Before all of it, with a loss scale: see to operations of the user's that bend gradients."""

    def __init__(
        self,
        rules: Rules,
        names: StackNames,
        key: str,
        observer: Observer | None = None,
        *,
        delay: DelayScales | None = None,
        weights: CachedWeights | None = None,
        record: RecordAmaxes | None = None,
        scale_loss: ScaleLoss | None = None,
        strict: bool = True,
    ) -> None:
        self.packed, self.experts = MultiplyPacked(names, rules.target), MultiplyExperts(names, rules.target)
        self.rewrite = RewriteMatmuls(rules, names, strict=strict)
        self.ran = False
        with_state = [*([UseWeightCache(weights)] if weights else []), *([delay] if delay else [])]
        pair = [PairQuantizes()] if rules.target != "cpu" and rules.recipe in ("rowwise", "blockwise") else []
        passes: list[GraphPass] = [self.rewrite, ShareQuantizes(), *with_state, *pair, LowerQuantizes(rules.target)]
        if record:  # nothing is rewritten yet
            passes = [record]
        if scale_loss:
            passes = [UnscaleNonlinear(), *passes, scale_loss]
        if rules.target == "cpu" and not record:
            passes.append(LowerScaledMmForCpu())
        if rules.reads_any_layout and not record:
            passes.append(ReadAgain())
        super().__init__(passes, key, observer)

    @property
    def rows(self) -> list[Row]:
        return [*self.packed.rows, *self.experts.rows, *self.rewrite.rows]

    def __call__(self, graph: fx.Graph) -> None:
        self.ran = True
        for one in (self.experts, self.packed):
            if one not in self.passes and one.applies(graph):
                self.passes.insert(0, one)
        super().__call__(graph)

    def phase(self, graph: fx.Graph) -> str:
        return "joint" if any(is_backward(node) for node in graph.nodes) else "inference"


class SplitPipeline(Pipeline):
    """What is better done when it is known which tensors are saved for backward."""

    def __init__(self, rules: Rules, key: str, observer: Observer | None = None) -> None:
        on_cpu = [CallCpuKernels(), FuseDelayedQuantizes(), OpenOneRow()]
        on_gpu = [LaunchQuantizes(), FuseCasts(), RelayoutBytes(), FlagOverflowInPlace()]
        if rules.target.startswith("cuda"):
            on_gpu.append(AddInGemm())
        if rules.reads_any_layout:
            on_gpu.insert(0, ForgetCopies())
        passes = [*on_cpu, UpdateInPlace()] if rules.target == "cpu" else [*on_gpu, UpdateInPlace(), SumInQuantizes()]
        super().__init__(passes, key, observer)

    def phase(self, graph: fx.Graph) -> str:
        # Not by the nodes' tags: forward saves values, such as the mask of a relu, that were traced for backward.
        gradients = (node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))
        return "backward" if any(gradients) else "forward"
