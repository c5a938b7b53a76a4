"""The code of one graph, for every module that runs it.

Scaling state, FP8 copies of weights and the loss scale are inputs of the code, after those of the graph. Which ones a
call gets is told by the parameters that it is made with: each module has its own. For parameters that were not seen
before, the stack says which model is running.
"""

from __future__ import annotations

import dataclasses
import weakref
from types import CodeType
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from fp8_compile.config import Config
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import Place, Slot
from fp8_compile.passes.graph.weight_grid import WeightGrid
from fp8_compile.scaling.coverage import note_fp8
from fp8_compile.scaling.find_state import state_of_modules
from fp8_compile.scaling.frozen_weights import FrozenWeights
from fp8_compile.scaling.graph_slots import BoundSlots, GraphSlots
from fp8_compile.scaling.graph_weights import FreshWeights, GraphWeights
from fp8_compile.scaling.layout import Prefix, moved
from fp8_compile.scaling.loss_scale import loss_scale_in_use
from fp8_compile.scaling.recorder import RunRecorder
from fp8_compile.scaling.state import ScalingState
from fp8_compile.scaling.training_grids import note_grids
from fp8_compile.torch_internals.dynamo import (
    compiled_root,
    evaluated,
    frame_code,
    guard_identity,
    modules_read,
    running_frame,
)
from fp8_compile.torch_internals.graphs import is_fake
from fp8_compile.torch_internals.modules import unwrap

from .module_names import whole_model
from .runner import Code, Runner


class Caller:
    """Finds out, when a code runs, for which modules it does."""

    def __init__(self, gm: fx.GraphModule) -> None:
        """For the graph that Dynamo is compiling."""
        self.code: CodeType | None = frame_code()
        self.has_root = compiled_root() is not None
        read = {} if self.has_root else modules_read(gm)
        self._sources = list(read)
        self._compiled_for = [weakref.ref(module) for module in read.values()]
        if not self.has_root and self.modules() != list(read.values()):
            self._sources = []  # the sources lead nowhere outside of Dynamo: the code is for these modules alone
            guard_identity(read)

    def modules(self) -> list[nn.Module]:
        """The model that ``torch.compile`` was called on; or the modules that a compiled function runs."""
        if self.has_root:
            root = compiled_root()
            return [root] if root is not None else []
        frame = running_frame(self.code) if self.code is not None and self._sources else None
        if frame is None:
            return [module for ref in self._compiled_for if (module := ref()) is not None]
        return [unwrap(evaluated(source, frame)) for source in self._sources]


@dataclasses.dataclass
class GraphInputs:
    """What the code of a graph is given beside its arguments, as it is compiled."""

    slots: GraphSlots | None = None
    weights: GraphWeights | None = None
    scaled: bool = False
    device: torch.device = torch.device("cpu")
    grids: Sequence[WeightGrid] = ()  # of the weights that a training graph reads


@dataclasses.dataclass
class SharedCode:
    """Call it as the compiled code, with the arguments of the graph."""

    compiled: Code
    caller: Caller
    config: Config
    inputs: GraphInputs
    parameters: Mapping[int, tuple[str, ...]]  # argument -> names in the model that the code was compiled for
    prefix: Prefix  # the frame's module there
    trains: bool
    keeps_state: bool  # under delayed scaling
    examples: Sequence[Tensor]  # like what the code is given, in order
    has_fp8: bool
    looking: Code | None = None
    warming: Code | None = None
    tell_dump: Callable[[str, BoundSlots | None], RunRecorder | None] | None = None  # that a module runs the code

    def __post_init__(self) -> None:
        self._runners: dict[Any, Runner] = {}
        self._watched: dict[Any, list[weakref.ref[Any]]] = {}
        self._arguments = list(self.parameters)

    def __call__(self, *args: Any) -> Any:
        key = tuple([id(args[index]) for index in self._arguments])
        runner = self._runners.get(key) if key else None
        return (runner or self._runner(key, args))(*args)

    def _runner(self, key: Any, args: Sequence[Any]) -> Code:
        """What runs the code for the modules that the stack shows."""
        if any(map(is_fake, args)):
            return self._on_fakes
        modules = self.caller.modules()
        watched: list[Any] = [args[index] for index in self._arguments] or modules
        key = key or tuple(map(id, modules))
        if key not in self._runners:
            self._runners[key] = self._bound(modules, args)
            self._watched[key] = [weakref.ref(one, _forget(self, key)) for one in watched]
        return self._runners[key]

    def _on_fakes(self, *args: Any) -> Any:
        """Someone traces the model: there is no state to read or to write."""
        made = (torch.zeros_like(one, device=one.device) for one in self.examples)
        return self.compiled(*args, *made)

    def _bound(self, modules: list[nn.Module], args: Sequence[Any]) -> Runner:
        if self.has_fp8:
            note_fp8(modules)
        state = state_of_modules(modules, self.caller.code) if self.keeps_state else None
        prefix, given, inputs = self._prefix_in(modules, args), self.inputs, list[Tensor]()
        if self.trains:
            note_grids(given.grids, args, state, given.slots, prefix)
        slots = None
        fresh: FreshWeights | FrozenWeights | None = None
        if given.slots is not None and state is not None:
            copied = {use.tensor for use in given.weights.uses.values()} if given.weights is not None else ()
            slots = given.slots.bound(state, prefix, besides=copied)
            inputs += slots.inputs
            fresh = self._frozen_weights(state, slots, prefix)
        if given.weights is not None and state is not None:
            # A training loop that has ended leaves code with copies, which are still renewed.
            copies = given.weights.bound(state.weights or state.new_weights(), prefix, args)
            inputs += copies.inputs
            fresh = FreshWeights(copies.read) if copies.read else None
        if given.scaled:
            scale = loss_scale_in_use(modules, self.caller.code, self.config)
            inputs += scale.inputs(given.device).values()
            if state is not None:
                state.set_gradient_unit(scale.value)
        recorder = self.tell_dump(self._name_of(modules, prefix), slots) if self.tell_dump is not None else None
        return Runner(
            self.compiled,
            state,
            slots,
            inputs,
            fresh,
            trains=self.trains,
            looking=self.looking,
            warming=self.warming,
            warmup_steps=self.config.warmup_steps,
            recorder=recorder,
        )

    def _frozen_weights(self, state: ScalingState, slots: BoundSlots, prefix: Prefix) -> FrozenWeights | None:
        """What looks after the weights whose scales are frozen in an inference graph."""
        given = self.inputs.slots
        if given is None or not slots.frozen:
            return None
        found: dict[int, tuple[Slot, Place]] = {}
        for use in (use for use in given.uses if use.role is Role.WEIGHT):
            slot = state.slot_of(moved(use, given.prefix, prefix), given.layout.frame)
            arguments = [index for index, names in self.parameters.items() if use.parameter in names]
            found |= {index: (slot, slots.places[slot]) for index in arguments[:1]}
        return FrozenWeights(state, found) if found else None

    @staticmethod
    def _name_of(modules: list[nn.Module], prefix: Prefix) -> str:
        """What the frame's module is called in the largest model on the stack, "layers.3"; its class if it is that."""
        if not modules:
            return "a compiled function"
        whole = whole_model(modules[0])
        names = (name for name, module in whole.named_modules() if unwrap(module) is modules[0])
        found = ".".join(part for part in (next(names, ""), prefix.name) if part)
        return found or type(modules[0]).__name__

    def _prefix_in(self, modules: list[nn.Module], args: Sequence[Any]) -> Prefix:
        """What the frame's module is called in the model that is running, told by where its parameters are there."""
        if not self.prefix.name or len(modules) != 1:
            return self.prefix
        names: dict[int, set[str]] = {}
        for name, parameter in modules[0].named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(name)
        here = {index: names[id(args[index])] for index in self._arguments if id(args[index]) in names}
        inside = {index: [name for name in self.parameters[index] if self.prefix.covers(name)] for index in here}
        locals_of = {index: [self.prefix.local(name) for name in found] for index, found in inside.items() if found}
        for prefix in self._candidates(here, locals_of):
            if all(here[index] & set(map(prefix.whole, found)) for index, found in locals_of.items()):
                return prefix
        return self.prefix

    @staticmethod
    def _candidates(here: Mapping[int, set[str]], locals_of: Mapping[int, list[str]]) -> Iterator[Prefix]:
        for index, found in locals_of.items():
            for local in found:
                for name in sorted(here[index]):
                    if f".{name}".endswith(f".{local}"):
                        yield Prefix(name[: -len(local)].rstrip("."))


def _forget(shared: SharedCode, key: Any) -> Callable[[Any], None]:
    """State goes with the parameters that it belongs to."""
    mine = weakref.ref(shared)

    def forget(_: Any) -> None:
        if (code := mine()) is not None:
            code._runners.pop(key, None)
            code._watched.pop(key, None)

    return forget
