"""The backend: ``torch.compile(model, backend="fp8")``.

Dynamo's graph comes in; config, target and names are made into rules; Inductor compiles it with our passes in
its joint graph; a report says what was done.
"""

from __future__ import annotations

import logging
import os
import pathlib
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import get_custom_graph_passes, get_hash_for_files

from .config import Config
from .double_backward import reject_double_backward
from .fast_paths import open_fast_paths
from .module_names import ModuleNames, Selection
from .passes.decide import Rules
from .passes.find_matmuls import Role
from .passes.pipeline import JointPipeline, SplitPipeline
from .report import Report
from .report_cache import ReportCache
from .shared_frames import keep_apart
from .target import Target

if TYPE_CHECKING:
    from .dump import GraphDump

log = logging.getLogger("fp8_compile")

# Config, targets and names decide what passes do: part of the key of Inductor's cache, beside their own sources.
SOURCE_HASH = get_hash_for_files(tuple(sorted(map(str, pathlib.Path(__file__).parent.glob("*.py"))))).hex()


class Backend:
    """The backend as an object to ask: ``backend.reports`` has one report a compiled graph."""

    __name__ = "fp8"

    def __init__(self, config: Config | None = None) -> None:
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"Backend expects a Config, got {type(config).__name__}: write Backend(Config(...))")
        self.config = config or Config()
        self.reports: list[Report] = []

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if options:
            raise ValueError(f"options {sorted(options)} and a Backend object contradict: put them in its Config")
        compiled, report = compile_graph(gm, example_inputs, self.config, mode)
        self.reports.append(report)
        log.info("%s", report.summary())
        return reject_double_backward(compiled)


def fp8(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The entry point behind ``backend="fp8"``: a :class:`Backend` with the options of the call."""
    return Backend(Config.from_options(options))(gm, example_inputs, mode=mode)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    mode: str | None = None,
    *,
    inner_compile: Callable[..., Any] = compile_fx_inner,
    strict: bool = True,
) -> tuple[Callable[..., Any], Report]:
    """Compile one graph with our passes and say what they did. ``explain`` passes an ``inner_compile`` that does
    not compile, and ``strict=False`` to get a report where a user of FP8 would get an error."""
    open_fast_paths(gm)
    target = config.target or Target.of_device(_device(example_inputs))
    names = ModuleNames.of_graph(gm)
    selection = Selection(config.include, config.exclude)
    selection.check(names.known)
    keep_apart(selection)
    folder = config.dump or os.environ.get("FP8_COMPILE_DUMP")
    dump = _new_dump(folder) if folder else None

    key = repr((SOURCE_HASH, config.fingerprint(), str(target), names.fingerprint(gm)))
    stored = ReportCache.entry(gm, example_inputs, key)
    rules = make_rules(config, target, selection)
    joint = JointPipeline(rules, names, stored.key, dump, strict=strict)
    split = SplitPipeline(rules, stored.key, dump)
    patches = {**(list_mode_options(mode) if mode else {}), **config.inductor}
    patches["joint_custom_pre_pass"] = _with_users("joint_custom_pre_pass", joint, patches)
    patches["post_grad_custom_pre_pass"] = _with_users("post_grad_custom_pre_pass", split, patches)
    compiled = compile_fx(gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches)

    if joint.ran:
        report = Report(tuple(joint.rows), config.recipe, str(target), cache="off" if dump else "miss")
        stored.write(report)
    else:
        report = stored.read()
    if dump:
        dump.write_report(report)
    return compiled, report


def make_rules(config: Config, target: Target, selection: Selection) -> Rules:
    """What config and target mean for a matmul."""
    fields = {"quantize_inputs": Role.INPUT, "quantize_weights": Role.WEIGHT, "quantize_gradients": Role.GRAD_OUTPUT}
    return Rules(
        recipe=config.recipe,
        target=str(target),
        forward=target.format(config.forward_format),
        backward=target.format(config.backward_format or config.forward_format),
        excluded=selection.reason_against,
        min_dim=config.min_dim,
        unquantized=frozenset(role for field, role in fields.items() if not getattr(config, field)),
        recipe_supported=config.recipe in target.recipes,
        alignment=target.alignment,
        needs_k_contiguous=target.needs_k_contiguous,
        e5m2_by_e5m2=target.e5m2_by_e5m2,
        only_output=None if config.recipe == "tensorwise" else target.rowwise_output,
    )


def _new_dump(folder: str) -> GraphDump:
    from .dump import GraphDump  # networkx takes a quarter of a second to import

    return GraphDump.create(folder)


def _device(example_inputs: Sequence[Any]) -> torch.device:
    """Where the graph runs: an accelerator if any input is on one (scalars may lie on the CPU)."""
    devices = [item.device for item in example_inputs if isinstance(item, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _with_users(field: str, ours: Any, patches: Mapping[str, Any]) -> list[Any]:
    """Our pass behind those that the user has set in Inductor's config."""
    return [*get_custom_graph_passes(patches.get(field, getattr(inductor_config, field))), ours]
