"""The passes of an export: those of an inference graph, less what needs Python when it runs."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

from torch import fx

from fp8_compile.backend.graph import make_rules
from fp8_compile.backend.module_names import ModuleNames
from fp8_compile.config import Config
from fp8_compile.kernels.cpu.ahead_of_time import SHIMS
from fp8_compile.passes.graph.row import Row
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.joint.multiply_packed import MultiplyPacked
from fp8_compile.passes.joint.rewrite_matmuls import RewriteMatmuls
from fp8_compile.passes.joint.share_quantizes import ShareQuantizes
from fp8_compile.passes.pipeline import JointPipeline, Observer, Pipeline, SplitPipeline
from fp8_compile.selection import Selection
from fp8_compile.target import Target
from fp8_compile.torch_internals.graphs import schema_name


class _Kept:
    """``compile_fx_aot`` copies its options deeply: what a copied pass records and dumps would be lost."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class ExportJoint(_Kept, JointPipeline):
    """The joint pipeline; an operation of ours that would need Python is an error."""

    def __init__(self, rules: Rules, names: ModuleNames, observer: Observer | None = None) -> None:
        super().__init__(rules, names, "export", observer, strict=False)
        self.names = names

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        left = [node for node in graph.nodes if _is_ours(node) and node.target not in SHIMS]
        if left:
            where = "; ".join(f"{self.names.module_of(node) or '(root)'}: {schema_name(node)}" for node in left)
            raise ValueError(
                f"{where}: a packed weight is read by something other than a matrix product, for which there is no "
                "code without Python; exclude the layer from packing"
            )


class ExportSplit(_Kept, SplitPipeline):
    """The pipeline of the forward that is left."""

    def __init__(self, rules: Rules, observer: Observer | None = None) -> None:
        super().__init__(rules, "export", observer)


class ProgramPipeline(Pipeline):
    """The passes of a program that is not compiled here: products of packed weights, and rows of all others."""

    def __init__(self, rules: Rules, names: ModuleNames, observer: Observer | None = None) -> None:
        self.packed, self.others = MultiplyPacked(names), RewriteMatmuls(rules, names, strict=False)
        super().__init__([self.packed, self.others, ShareQuantizes()], "export", observer)

    @property
    def rows(self) -> list[Row]:
        return [*self.packed.rows, *self.others.rows]

    def phase(self, graph: fx.Graph) -> str:
        return "inference"


def _is_ours(node: fx.Node) -> bool:
    return schema_name(node).startswith("fp8_compile::")


def inference_rules(config: Config) -> Rules:
    """Rules by which nothing is rewritten that is not packed."""
    rules = make_rules(config, Target.parse("cpu"), Selection(("*",), ()))
    return dataclasses.replace(rules, excluded=_not_packed)


def _not_packed(module: str, weights: Sequence[str] = ()) -> str:
    return "not packed: in the model's own precision"
