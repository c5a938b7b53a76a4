"""The passes of an export: those of an inference graph, less what needs Python when it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.cpu.ahead_of_time import SHIMS

from .backend import make_rules
from .config import Config
from .module_names import ModuleNames, Selection
from .passes.decide import Rules
from .passes.open_fp8_products import OpenFp8Products
from .passes.pipeline import JointPipeline, SplitPipeline
from .target import Target


class _Kept:
    """``compile_fx_aot`` copies its options deeply: what a copied pass records would be lost."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class ExportJoint(_Kept, JointPipeline):
    """The joint pipeline, with FP8 products opened."""

    def __init__(self, rules: Rules, names: ModuleNames) -> None:
        super().__init__(rules, names, "export", strict=False)
        self.passes.append(OpenFp8Products())


class ExportSplit(_Kept, SplitPipeline):
    """The split pipeline; ``left`` says which operations of ours have no code without Python."""

    def __init__(self, rules: Rules, names: ModuleNames) -> None:
        super().__init__(rules, "export")
        self.names = names
        self.left: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "fp8_compile":
                if node.target not in SHIMS:
                    self.left.append(f"{self.names.module_of(node) or '(root)'}: {node.target._schema.name}")


def inference_rules() -> Rules:
    """Nothing is rewritten that is not packed."""
    rules = make_rules(Config(recipe="tensorwise"), Target.parse("cpu"), Selection(("*",), ()))
    return dataclasses.replace(rules, excluded=lambda module, weights=(): "not packed: in the model's own precision")
