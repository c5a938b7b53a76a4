"""The backend: ``torch.compile(model, backend="fp8")``.

Dynamo's graph comes in; config, target and names are made into rules; Inductor compiles it with our passes in
its joint graph; a report says what was done.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch
from torch import fx

from fp8_compile.config import Config
from fp8_compile.passes.graph.row import code_path
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.joint.delay_scales import DelayScales
from fp8_compile.passes.joint.record_amaxes import RecordAmaxes
from fp8_compile.passes.joint.scale_loss import ScaleLoss
from fp8_compile.passes.pipeline import JointPipeline, SplitPipeline
from fp8_compile.report import Report
from fp8_compile.scaling.coverage import note
from fp8_compile.scaling.find_state import state_of_compilation
from fp8_compile.scaling.graph_slots import GraphPool, PoolFull, open_pool, update_rule
from fp8_compile.scaling.graph_weights import GraphWeights, open_weights
from fp8_compile.scaling.loss_scale import GraphLossScale, loss_scale_of_compilation
from fp8_compile.scaling.recorder import RunRecorder
from fp8_compile.scaling.state import ScalingState
from fp8_compile.selection import Selection
from fp8_compile.target import Target
from fp8_compile.torch_internals.inductor import compile_joint, mode_options, passes_of_user

from .buffers import attach_buffers, attach_state
from .fused_inference_ops import decompose_fused_ops
from .interpret import NO_CACHE, run_uncompiled
from .module_names import ModuleNames
from .report_cache import ReportCache
from .rules import make_rules
from .runner import Runner
from .shared_frames import keep_apart, keep_each_apart, make_room

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
    decompose_fused_ops(gm)
    device = _device(example_inputs)
    target = config.target if isinstance(config.target, Target) else Target.of_device(device)
    names = ModuleNames.of_graph(gm, config.include)
    selection = Selection(config.include, config.exclude, names.heads)
    selection.check(names.known)
    state = state_of_compilation(gm) if config.recipe == "delayed" else None
    trains = torch.is_grad_enabled() and any(_has_gradient(item) for item in (*example_inputs, *gm.parameters()))
    keeps_state = state is not None and (trains or state.frozen is not None)
    make_room(gm)
    if keeps_state:
        keep_each_apart(gm)
    else:
        keep_apart(selection)
    rules = make_rules(config, target, selection)
    pool = None
    if state is not None and keeps_state:
        modules = {names.module_of(node) for node in gm.graph.nodes}
        pool = open_pool(gm, modules, config, rules, device, state, trains=trains)
    elif state is not None:
        rules = dataclasses.replace(rules, recipe="tensorwise")  # what a call computes does not depend on calls before
    loss_scale = loss_scale_of_compilation(gm, config, strict=strict)
    if pool and loss_scale:
        pool.state.set_gradient_unit(loss_scale.value)
    graph = _Graph(
        gm,
        example_inputs,
        config,
        rules,
        names,
        strict,
        {**(mode_options(mode) if mode else {}), **config.inductor},
        state,
        pool,
        open_weights(gm, pool, rules) if pool and trains else None,
        loss_scale,
        device,
        trains,
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
    pool: GraphPool | None  # the graph's slots in it, if it has any
    weights: GraphWeights | None
    loss_scale: GraphLossScale | None
    device: torch.device
    trains: bool

    def compile(self, inner_compile: Callable[..., Any] | None) -> tuple[Callable[..., Any], Report]:
        """The code and what it does; once more with more room where the graph has more tensors than was foreseen."""
        while True:
            dump = new_dump(self.config, self.names)
            try:
                compiled, report = self._compile_once(inner_compile, dump)
                return self._with_state(compiled, dump), report
            except PoolFull as full:
                assert self.pool is not None
                self.pool.make_room(full.direction, full.needed)

    def _compile_once(
        self, inner_compile: Callable[..., Any] | None, dump: GraphDump | None
    ) -> tuple[Callable[..., Any], Report]:
        config, pool, loss_scale, weights = self.config, self.pool, self.loss_scale, self.weights
        stored = ReportCache.entry(self.gm, self.example_inputs, self._key())
        if pool:
            attach_state(self.gm, pool, stats=config.stats)
        if weights:
            attach_buffers(self.gm, weights.buffers())
        if loss_scale:
            attach_buffers(self.gm, loss_scale.buffers(self.device))
        joint = self._joint_pipeline(stored.key, dump, look_first=self._looks_itself)
        split = SplitPipeline(self.rules, stored.key, dump)
        compiled = self._compile_fx(joint, split, self.patches, inner_compile)

        if joint.ran:
            report = Report(tuple(joint.rows), config.recipe, self.rules.target, cache="off" if dump else "miss")
            stored.write(report, pool.to_list() if pool else [], weights.to_list() if weights else [])
        else:
            report = stored.read()
            if pool:
                pool.adopt(stored.slots)
            if weights:
                weights.adopt(stored.weights)
        if weights:
            weights.finish()
        if dump:
            dump.slot_names = pool.names() if pool else {}
            dump.write_report(report)
        return compiled, report

    def _key(self) -> str:
        """Everything that the code depends on beside the graph and its inputs."""
        pool, weights, loss_scale = self.pool, self.weights, self.loss_scale
        state = (
            pool.fingerprint if pool else None,
            weights.fingerprint if weights else None,
            loss_scale.wide if loss_scale else None,
            pool.state.held if pool else None,
        )
        lines = [code_path(node) for node in self.gm.graph.nodes] if pool else None  # slots are told apart by them
        names = self.names.fingerprint(self.gm)
        return repr((self.config.fingerprint(), self.rules.target, names, state, lines))

    @property
    def _looks_itself(self) -> bool:
        """True if the compiled code can scale a tensor by its own amax, when it has no history: see ``runner.py``."""
        return self.rules.target == "cpu"

    def _with_state(self, compiled: Callable[..., Any], dump: GraphDump | None) -> Callable[..., Any]:
        """The code with the state that it needs, call after call."""
        pool, steps = self.pool, self.config.warmup_steps
        if self.state is None or (self.trains and not (pool and pool.places)):
            return compiled
        if pool is None or not pool.places:
            return Runner(compiled, self.state, trains=self.trains)
        records = dump is not None and dump.trains and self.config.stats
        return Runner(
            compiled,
            self.state,
            pool,
            self.weights,
            trains=self.trains,
            looking=None if self._looks_itself or pool.frozen else self._compile_looking(),
            warming=self._compile_warm_up() if steps and torch.is_grad_enabled() else None,
            warmup_steps=steps,
            recorder=RunRecorder(dump.path, pool, dump.refresh_page) if dump and records else None,
        )

    def _compile_looking(self) -> Callable[..., Any]:
        """The graph uncompiled, scaling each tensor that has no history by its own amax."""
        joint = self._joint_pipeline("uncompiled", None, look_first=True)
        return self._compile_fx(joint, None, {**self.patches, **NO_CACHE}, run_uncompiled)

    def _compile_warm_up(self) -> Callable[..., Any]:
        """The graph uncompiled and in high precision, recording amaxes."""
        assert self.pool is not None
        rule, held = update_rule(self.config), self.pool.state.held
        record = RecordAmaxes(self.rules, self.names, self.pool, rule, held=held)
        joint = self._joint_pipeline("warm-up", None, look_first=True, record=record)
        return self._compile_fx(joint, None, {**self.patches, **NO_CACHE}, run_uncompiled)

    def _joint_pipeline(
        self, key: str, dump: GraphDump | None, *, look_first: bool, record: RecordAmaxes | None = None
    ) -> JointPipeline:
        delay = None
        if self.pool:
            rule, held = update_rule(self.config), self.pool.state.held
            delay = DelayScales(self.pool, rule, look_first=look_first, stats=self.config.stats, held=held)
        scale_loss = ScaleLoss(self.names, wide=self.loss_scale.wide) if self.loss_scale else None
        return JointPipeline(
            self.rules,
            self.names,
            key,
            dump,
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
        ours = {"joint_custom_pre_pass": with_users("joint_custom_pre_pass", joint, patches)}
        if split:
            ours["post_grad_custom_pre_pass"] = with_users("post_grad_custom_pre_pass", split, patches)
        # The first run in FP8 comes after the warm-up: nothing may be left to compile then, as backward of dynamic
        # shapes would be.
        whole = self.config.warmup_steps > 0
        return compile_joint(self.gm, self.example_inputs, {**patches, **ours}, inner_compile, whole=whole)


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
