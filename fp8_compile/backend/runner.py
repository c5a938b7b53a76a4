"""Delayed scaling in the backend: a graph gets its part of the model's state, and its first passes are looked after.

The first passes of a graph have no history to take scales from: until its backward has run once, every tensor is
quantized with its own amax, also where the graph is called several times before. CPU code can do both, and a flag in
the state chooses. GPU code could look at a tensor first only by reading every tensor twice, on every pass. There the
first passes run through an uncompiled twin of the graph; when all slots have a history, the compiled code takes over.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Container, Mapping

import torch
from torch import Tensor, fx

from fp8_compile.config import Config
from fp8_compile.kernels.delayed_scaling import ABSENT
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.graph.slot import BACKWARD, FIELDS, FORWARD, FROZEN, STATS, Place, Slot
from fp8_compile.passes.graph.update_rule import UpdateRule
from fp8_compile.scaling.graph_slots import GraphPool
from fp8_compile.scaling.recorder import PassRecorder
from fp8_compile.scaling.state import ScalingState
from fp8_compile.scaling.table import PageKind
from fp8_compile.torch_internals.autograd import is_recomputation
from fp8_compile.torch_internals.dynamo import compilation, frame_key, name_buffer
from fp8_compile.torch_internals.graphs import is_fake

from .module_names import ModuleNames

log = logging.getLogger("fp8_compile")

# Ops of a Dynamo graph that become matmuls, by a part of their name.
MATMULS = ("linear", "matmul", "mm", "einsum", "attention", "tensordot", "multi_head", "lstm", "gru", "rnn", "bilinear")
SLOTS_A_MATMUL = 4  # two operands in forward, seldom more than one gradient, and some to spare
FIRST_PASSES = 8  # a slot that saw only zeros in as many passes is left at a scale of 1


def open_pool(
    gm: fx.GraphModule,
    names: ModuleNames,
    config: Config,
    rules: Rules,
    device: torch.device,
    state: ScalingState,
    *,
    trains: bool,
) -> GraphPool:
    """The slots for a graph, with room for those it may need. One that does not train has frozen scales alone."""
    modules = {names.module_of(node) for node in gm.graph.nodes}
    room = SLOTS_A_MATMUL * max(1, _matmuls(gm))
    frame = state.begin_graph(frame_key(), compilation())
    return GraphPool(state, _kinds(config, rules, device, trains), room, modules, frame)


def attach_state(gm: fx.GraphModule, pool: GraphPool, *, stats: bool) -> None:
    """Give a graph its part of the scaling state."""
    attach_buffers(gm, pool.buffers((*FIELDS, STATS) if stats else FIELDS))


def attach_buffers(gm: fx.GraphModule, buffers: Mapping[str, Tensor]) -> None:
    """Make tensors buffers of the graph: they reach the joint graph as placeholders with these names."""
    for name, tensor in buffers.items():
        gm.register_buffer(name, tensor)
        name_buffer(gm, name)


def update_rule(config: Config) -> UpdateRule:
    return UpdateRule(config.margin, config.amax_algorithm, config.scale_update_interval)


class LookFirst:
    """Run ``looking``, which scales each tensor by its own amax, until all slots have a history; then ``compiled``.

    ``looking`` is None where the compiled code can do that itself. A graph that is called several times in a step
    goes on looking until a backward has run, because gradients have no history before.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        looking: Callable[..., Any] | None,
        pool: GraphPool,
        cached: Container[Slot] = (),
    ) -> None:
        """``cached``: weights that the graph reads copies of, which have been quantized when it runs."""
        self.compiled, self.looking = compiled, looking
        self.state = pool.state
        self.places = {slot: place for slot, place in pool.places.items() if slot not in cached}
        self.epoch = -1  # of the state, when its histories were last found complete
        self.looks_at: tuple[int, dict[Slot, Place]] = (-1, {})  # the epoch, and the slots that had no history then

    def __call__(self, *args: Any) -> Any:
        if self.epoch == self.state.epoch or any(map(is_fake, args)):
            return self.compiled(*args)
        # A recomputation has the scales of the first time, though backward may have filled histories since.
        if is_recomputation() or self._has_to_look():
            return (self.looking or self.compiled)(*args)
        return self.compiled(*args)

    def _has_to_look(self) -> bool:
        """Whether histories are missing. A tensor that was zero in all its first passes is not waited for."""
        missing = self.state.without_history(self.places)
        if self.looks_at[0] != self.state.epoch:
            self.looks_at = self.state.epoch, {slot: self.places[slot] for slot in missing}
        if any(passes < FIRST_PASSES for passes in missing.values()):
            self.state.begin_looking(self.looks_at[1])
            return True
        self.state.finish_looking(self.places)
        if missing and self.looking is not None:
            log.warning(
                "%d tensors were zero or not finite in the first %d passes and start with a scale of 1: %s",
                len(missing),
                FIRST_PASSES,
                ", ".join(map(str, missing)),
            )
            self.state.start_at_one(self.places[slot] for slot in missing)
        self.epoch = self.state.epoch
        return False


class LookAgain:
    """Run an inference graph; afterwards, copies of weights are no longer trusted.

    Who evaluates a model may have put other weights into it through ``.data``, which no version counter tells.
    """

    def __init__(self, compiled: Callable[..., Any], state: ScalingState) -> None:
        self.compiled, self.state = compiled, state

    def __call__(self, *args: Any) -> Any:
        if (weights := self.state.weights) is not None:
            weights.distrust()
        return self.compiled(*args)


class CountOnce:
    """Run ``compiled``; where that is a recomputation, leave no trace of it in the state.

    A checkpoint's recomputation runs inside a backward, under hooks that catch what it saves. The state still has the
    scales of the first run, unless another pass has begun since, because what that run recorded is taken over only
    when the next pass begins: hidden for a moment, it makes the second run the same as the first, bit for bit.
    (A reentrant checkpoint's first run is without gradients and records nothing. Its recomputation, without hooks,
    is the one that counts.)

    ``recorder`` is told when a pass begins.
    """

    def __init__(self, compiled: Callable[..., Any], pool: GraphPool, recorder: PassRecorder | None = None) -> None:
        self.compiled, self.recorder = compiled, recorder
        self.pages = [pool.state.pages[index] for index in {place.page for place in pool.places.values()}]

    def __call__(self, *args: Any) -> Any:
        if not is_recomputation():
            if self.recorder is not None:
                self.recorder.begin_pass()
            return self.compiled(*args)
        kept = [(page.amaxes.clone(), page.stats.clone()) for page in self.pages]
        for page in self.pages:
            page.amaxes.data.fill_(ABSENT)
        try:
            return self.compiled(*args)
        finally:
            for page, (amaxes, stats) in zip(self.pages, kept):
                page.amaxes.data.copy_(amaxes)
                page.stats.data.copy_(stats)


def _kinds(config: Config, rules: Rules, device: torch.device, trains: bool) -> list[PageKind]:
    formats = {FORWARD: rules.forward, BACKWARD: rules.backward} if trains else {FROZEN: rules.forward}
    return [
        PageKind(direction, device, config.amax_history_len, format.max, update_rule(config))
        for direction, format in formats.items()
    ]


def _matmuls(gm: fx.GraphModule) -> int:
    """How many matmuls a Dynamo graph may have, its subgraphs included."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    names = (str(node.target).lower() for graph in graphs for node in graph.nodes if node.op.startswith("call"))
    return sum(any(part in name for part in MATMULS) for name in names)
