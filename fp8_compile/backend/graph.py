"""The backend: ``torch.compile(model, backend="fp8")``.

Dynamo's graph comes in; config, target and names are made into rules; Inductor compiles it with our passes in
its joint graph; a report says what was done.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from fp8_compile.config import Config
from fp8_compile.passes.graph.row import code_path
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.graph.weight_grid import WeightGrid
from fp8_compile.passes.joint.delay_scales import DelayScales
from fp8_compile.passes.joint.record_amaxes import RecordAmaxes
from fp8_compile.passes.joint.scale_loss import ScaleLoss
from fp8_compile.passes.pipeline import JointPipeline, SplitPipeline
from fp8_compile.report import Report
from fp8_compile.scaling.coverage import note
from fp8_compile.scaling.find_state import state_of_compilation
from fp8_compile.scaling.graph_slots import BoundSlots, GraphSlots, open_slots, update_rule
from fp8_compile.scaling.graph_weights import GraphWeights, open_weights
from fp8_compile.scaling.layout import LayoutFull, Prefix
from fp8_compile.scaling.loss_scale import GraphLossScale, loss_scale_of
from fp8_compile.scaling.recorder import RunRecorder
from fp8_compile.scaling.state import ScalingState
from fp8_compile.selection import Selection
from fp8_compile.target import Target
from fp8_compile.torch_internals import patches
from fp8_compile.torch_internals.dynamo import add_inputs, compiled_modules, frame_code, own_copy
from fp8_compile.torch_internals.graphs import fake_like
from fp8_compile.torch_internals.inductor import compile_joint, mode_options, passes_of_user
from fp8_compile.torch_internals.partitioner import split_and_shrink

from .fused_inference_ops import decompose_fused_ops
from .interpret import NO_CACHE, run_uncompiled
from .kept_blocks import kept_in_graph
from .module_names import ModuleNames
from .noted_code import NotedCode
from .report_cache import ReportCache
from .rules import Precision, make_rules
from .runner import Code
from .shared_code import Caller, GraphInputs, SharedCode
from .variants import keep_apart

if TYPE_CHECKING:
    from fp8_compile.reporting.dump import GraphDump


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    mode: str | None = None,
    *,
    inner_compile: Callable[..., Any] | None = None,
    strict: bool = True,
) -> tuple[Callable[..., Any], Report]:
    """Compile one graph with our passes and say what they did. ``explain`` passes an ``inner_compile`` that does
    not compile, and ``strict=False`` to get a report where a user of FP8 would get an error."""
    gm = own_copy(gm)
    decompose_fused_ops(gm)
    device = _device(example_inputs)
    target = config.target if isinstance(config.target, Target) else Target.of_device(device)
    names = ModuleNames.of_graph(gm, config.include)
    kept = kept_in_graph(config, strict=strict)
    selection = Selection(config.include, config.exclude, names.heads, kept.names, kept.asked_for)
    selection.check(names.known)
    state = state_of_compilation(gm) if config.keeps_state else None
    trains = torch.is_grad_enabled() and any(_has_gradient(item) for item in (*example_inputs, *gm.parameters()))
    keeps_state = state is not None and (trains or state.frozen is not None)
    keep_apart(gm, config)
    precision = Precision()
    rules = dataclasses.replace(make_rules(config, target, selection), high=precision)
    slots = None
    if state is not None and keeps_state:
        slots = open_slots(gm, config, rules, device, state, names.frame, trains=trains)
    elif rules.recipe == "delayed":
        rules = dataclasses.replace(rules, recipe="tensorwise")  # what a call computes does not depend on calls before
    graph = _Graph(
        gm,
        example_inputs,
        config,
        rules,
        names,
        strict,
        {**(mode_options(mode) if mode else {}), **config.inductor},
        state,
        slots,
        open_weights(gm, slots, rules) if slots and trains else None,
        loss_scale_of(compiled_modules(gm), frame_code(), config, strict=strict),
        device,
        trains,
        (sorted(kept.names.items()), precision.fingerprint),
    )
    compiled, report = graph.compile(inner_compile)
    if strict:
        note(gm, report)
    return compiled, report


@dataclasses.dataclass
class _Graph:
    """One graph on its way through Inductor."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    config: Config
    rules: Rules
    names: ModuleNames
    strict: bool
    patches: dict[str, Any]
    state: ScalingState | None  # of the model, under delayed scaling
    slots: GraphSlots | None  # the graph's, if it has any
    weights: GraphWeights | None
    loss_scale: GraphLossScale | None
    device: torch.device
    trains: bool
    choices: Any  # what was chosen for modules by other means than the options, for the key of the cache
    grids: Sequence[WeightGrid] = ()  # of its weights; known when it is compiled

    def compile(self, inner_compile: Callable[..., Any] | None) -> tuple[Callable[..., Any], Report]:
        """The code and what it does; once more with more room where the graph has more tensors than was foreseen."""
        while True:
            dump = new_dump(self.config, self.names)
            try:
                compiled, report = self._compile_once(inner_compile, dump)
                return self._with_state(compiled, report, dump), report
            except LayoutFull as full:
                assert self.slots is not None
                del self._added
                self.slots.make_room(full.direction, full.needed)

    def _compile_once(
        self, inner_compile: Callable[..., Any] | None, dump: GraphDump | None
    ) -> tuple[Callable[..., Any], Report]:
        config, slots, weights = self.config, self.slots, self.weights
        stored = ReportCache.entry(self.gm, self.example_inputs, self._key())
        if slots and stored.stored and not slots.may_adopt(stored.slots):
            stored = ReportCache.entry(self.gm, self.example_inputs, self._key() + slots.layout.fingerprint)
        joint = self._joint_pipeline(stored.key, dump, look_first=self._looks_itself)
        split = SplitPipeline(self.rules, stored.key, dump)
        compiled = self._compile_fx(joint, split, self.patches, inner_compile)

        if joint.ran:
            report = Report(tuple(joint.rows), config.recipe, self.rules.target, cache="off" if dump else "miss")
            self.grids = joint.grids
            grids = [grid.to_list() for grid in self.grids]
            stored.write(report, slots.to_list() if slots else [], weights.to_list() if weights else [], grids)
        else:
            report = stored.read()
            self.grids = list(map(WeightGrid.from_list, stored.grids))
            if slots:
                slots.adopt(stored.slots)
            if weights:
                weights.adopt(stored.weights)
        if dump:
            dump.slot_names = slots.names() if slots else {}
            dump.write_report(report)
        return compiled, report

    def _key(self) -> str:
        """Everything that the code depends on beside the graph and its inputs."""
        slots, weights, loss_scale = self.slots, self.weights, self.loss_scale
        state = (
            slots.fingerprint if slots else None,
            weights.fingerprint if weights else None,
            loss_scale.wide if loss_scale else None,
            slots.state.held if slots else None,
        )
        lines = [code_path(node) for node in self.gm.graph.nodes] if slots else None  # slots are told apart by them
        names = self.names.fingerprint(self.gm), self.choices
        return repr((self.config.fingerprint(), self.rules.target, names, state, lines))

    @property
    def _looks_itself(self) -> bool:
        """True if the compiled code can scale a tensor by its own amax, when it has no history: see ``runner.py``."""
        return self.rules.target == "cpu"

    @functools.cached_property
    def _added(self) -> dict[str, Tensor]:
        """What the code is given after the arguments of the graph: name -> example."""
        found: dict[str, Tensor] = {}
        with fake_like(self.example_inputs):
            for part in (self.slots, self.weights):
                found |= part.examples(self.device) if part else {}
            if self.loss_scale:
                found |= self.loss_scale.examples(self.device)
        return found

    def _with_state(self, compiled: Code, report: Report, dump: GraphDump | None) -> Code:
        """The code with the state that it needs, call after call."""
        if not self._added and (self.state is None or self.trains):
            return NotedCode(compiled, self.grids) if self.trains and self.grids else compiled
        slots = self.slots if self.slots and self.slots.uses else None
        looks = slots is not None and not slots.frozen and not self._looks_itself and self.config.delays
        warms = slots is not None and self.config.warmup_steps > 0 and torch.is_grad_enabled()
        records = slots is not None and dump is not None and dump.trains and self.config.stats
        tell_dump = functools.partial(_tell_dump, dump, records) if dump is not None else None
        return SharedCode(
            compiled,
            Caller(self.gm),
            self.config,
            GraphInputs(self.slots, self.weights, self.loss_scale is not None, self.device, self.grids),
            self.names.parameters(),
            Prefix(self.names.frame),
            self.trains,
            self.state is not None,
            list(self._added.values()),
            bool(report.rewritten),
            looking=self._compile_looking() if looks else None,
            warming=self._compile_warm_up() if warms else None,
            tell_dump=tell_dump,
        )

    def _compile_looking(self) -> Callable[..., Any]:
        """The graph uncompiled, scaling each tensor that has no history by its own amax."""
        joint = self._joint_pipeline("uncompiled", None, look_first=True)
        return self._compile_fx(joint, None, {**self.patches, **NO_CACHE}, run_uncompiled)

    def _compile_warm_up(self) -> Callable[..., Any]:
        """The graph uncompiled and in high precision, recording amaxes."""
        assert self.slots is not None
        rule, held = update_rule(self.config), self.slots.state.held
        record = RecordAmaxes(self.rules, self.names, self.slots, rule, held=held)
        joint = self._joint_pipeline("warm-up", None, look_first=True, record=record)
        return self._compile_fx(joint, None, {**self.patches, **NO_CACHE}, run_uncompiled)

    def _joint_pipeline(
        self, key: str, dump: GraphDump | None, *, look_first: bool, record: RecordAmaxes | None = None
    ) -> JointPipeline:
        delay = None
        if self.slots:
            rule, held = update_rule(self.config), self.slots.state.held
            calls = self.rules.target == "cpu" and patches.active("cheap_ops")
            how = {"stats": self.config.stats, "held": held, "exact": not self.config.delays, "calls": calls}
            delay = DelayScales(self.slots, rule, look_first=look_first, **how)
        scale_loss = ScaleLoss(self.names, wide=self.loss_scale.wide) if self.loss_scale else None
        return JointPipeline(
            self.rules,
            self.names,
            key,
            dump,
            inputs=dict(enumerate(self._added, start=len(self.example_inputs))),
            delay=delay,
            record=record,
            scale_loss=scale_loss,
            weights=self.weights,
            strict=self.strict,
        )

    def _compile_fx(
        self,
        joint: JointPipeline,
        split: SplitPipeline | None,
        patches: dict[str, Any],
        inner_compile: Callable[..., Any] | None,
    ) -> Callable[..., Any]:
        ours: dict[str, Any] = {"joint_custom_pre_pass": with_users("joint_custom_pre_pass", joint, patches)}
        if split:
            ours["post_grad_custom_pre_pass"] = with_users("post_grad_custom_pre_pass", split, patches)
            if split.shrinking and inner_compile is None:  # another compiler gets the halves as they were split
                ours |= split_and_shrink(split.shrink, split.uuid(), patches)
        gm = own_copy(self.gm)
        add_inputs(gm, self._added)
        # The first run in FP8 comes after the warm-up: nothing may be left to compile then, as backward of dynamic
        # shapes would be.
        whole = self.config.warmup_steps > 0
        inputs = [*self.example_inputs, *self._added.values()]
        return compile_joint(gm, inputs, {**patches, **ours}, inner_compile, whole=whole)


def _tell_dump(dump: GraphDump, records: bool, name: str, slots: BoundSlots | None) -> RunRecorder | None:
    """A module runs the graph."""
    path = dump.add_module(name)
    return RunRecorder(path, slots, dump.refresh_page) if records and slots is not None else None


def new_dump(config: Config, names: ModuleNames) -> GraphDump | None:
    """Where one graph is dumped to, if it is."""
    folder = config.dump or os.environ.get("FP8_COMPILE_DUMP")
    if not folder:
        return None
    from fp8_compile.reporting.dump import GraphDump  # networkx takes a quarter of a second to import

    return GraphDump.create(folder, names)


def _has_gradient(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad


def _device(example_inputs: Sequence[Any]) -> torch.device:
    """Where the graph runs: an accelerator if any input is on one (scalars may be on the CPU)."""
    devices = [item.device for item in example_inputs if isinstance(item, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def with_users(field: str, ours: Any, patches: Mapping[str, Any]) -> list[Any]:
    """Our pass after those that the user has set in Inductor's config."""
    return [*passes_of_user(field, patches), ours]
