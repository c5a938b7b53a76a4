"""The cached weights that one graph is compiled with, and the check before each of its runs that they are fresh."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from fp8_compile.kernels.cpu.fingerprint import Fingerprints
from fp8_compile.passes.graph.cached_weights import CODES, SCALES, TRANSPOSED, Use, weight_input
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.graph.slot import FORWARD, TensorUse
from fp8_compile.torch_internals.autograd import are_as_seen, version
from fp8_compile.torch_internals.dynamo import real_input
from fp8_compile.torch_internals.modules import gathered_by_fsdp, local_part

from .cached_weight import CachedWeight
from .graph_slots import GraphSlots
from .layout import Prefix, moved
from .weight_cache import CopyForm, WeightCache
from .weight_sampler import Sampler

# Ops that look a weight up and do not multiply by it; all else may end in a matmul.
LOOKUPS = ("embedding",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GraphWeights:
    """The copies offered to a graph: of every matrix among its parameters that a matmul may read. When the graph is
    compiled it is known which are read."""

    def __init__(self, slots: GraphSlots, candidates: Mapping[int, Tensor], rules: Rules) -> None:
        """``candidates``: argument of the graph -> parameter."""
        self.slots, self.dtype = slots, rules.forward.dtype
        self.transposed = rules.needs_k_contiguous and not rules.reads_any_layout
        self.shapes = {argument: tuple(local_part(weight).shape) for argument, weight in candidates.items()}
        self.uses: dict[int, Use] = {}

    @property
    def fingerprint(self) -> str:
        """What code depends on."""
        return repr((sorted(self.shapes), self.transposed))

    def examples(self, device: torch.device) -> dict[str, Tensor]:
        """Name in the graph -> a tensor like the one that the code will be given."""
        return {name: made for argument in self.shapes for name, made in self._examples_of(argument, device).items()}

    def _examples_of(self, argument: int, device: torch.device) -> dict[str, Tensor]:
        rows, cols = self.shapes[argument]
        named = {weight_input(argument, CODES): torch.empty(rows, cols, dtype=self.dtype, device=device)}
        if self.transposed:
            named[weight_input(argument, TRANSPOSED)] = torch.empty(cols, rows, dtype=self.dtype, device=device)
        named[weight_input(argument, SCALES)] = torch.empty(2, dtype=torch.float32, device=device)
        return named

    def use(self, use: Use) -> bool:
        known = self.uses.setdefault(use.argument, use)
        return known.via == use.via  # half of a graph under autocast, half not: one copy is offered

    def bound(self, cache: WeightCache, prefix: Prefix, args: Sequence[Any]) -> BoundWeights:
        """The copies for a module that runs the graph with these arguments."""
        kind, bound = self.slots.layout.kinds[FORWARD], BoundWeights({}, [])
        for argument in self.shapes:
            use = self.uses.get(argument)
            if use is None:
                unread = self._examples_of(argument, local_part(args[argument]).device).values()
                bound.inputs += map(_without_memory, unread)
                continue
            form = CopyForm(self.dtype, self.transposed, use.via, kind)
            own = moved(use.tensor, self.slots.prefix, prefix)
            entry = bound.read[argument] = cache.entry(args[argument], own, self.slots.layout.frame, form)
            bound.inputs += [*entry.tensors(), entry.scales]
        return bound

    def to_list(self) -> list[Any]:
        """Plain data for the report cache: what code from Inductor's cache reads."""
        rows = []
        for use in self.uses.values():
            via = str(use.via).removeprefix("torch.") if use.via else None
            rows.append([use.argument, via, *dataclasses.astuple(use.tensor)])
        return rows

    def adopt(self, stored: Iterable[Any]) -> None:
        for argument, via, *tensor in stored:
            self.use(Use(argument, TensorUse.from_list(tensor), getattr(torch, via) if via else None))


@dataclasses.dataclass
class BoundWeights:
    """The copies that a graph reads for one module; ``inputs`` are the tensors that the code is given."""

    read: dict[int, CachedWeight]
    inputs: list[Tensor]


class FreshWeights:
    """Has the copies that a graph reads renewed before it runs, where their weights have changed."""

    def __init__(self, read: Mapping[int, CachedWeight]) -> None:
        by_cache: dict[WeightCache, dict[int, CachedWeight]] = {}
        for argument, entry in read.items():
            by_cache.setdefault(entry.cache, {})[argument] = entry
        self._read = [(cache, Sampler(cache), entries) for cache, entries in by_cache.items()]
        self._found_fresh: _FoundFresh | None = None

    def __call__(self, args: Sequence[Any]) -> None:
        """``args``: of the graph."""
        if self._found_fresh is not None and self._found_fresh.holds(args):
            return
        for cache, sampler, entries in self._read:
            weights: dict[CachedWeight, Tensor] = {entry: args[argument] for argument, entry in entries.items()}
            cache.ensure_fresh(weights, sampler)
        self._found_fresh = _FoundFresh.now(args, self._read)


@dataclasses.dataclass
class _FoundFresh:
    """What was so when all copies were last found fresh. As long as it is, they are: asked before every run, so it is
    little Python and one call of C++. For weights on the CPU; on a GPU the kernel that looks at them is launched."""

    cache: WeightCache
    changes: int
    epoch: int
    seen: list[tuple[int, int, int]]  # see are_as_seen()
    fingerprints: Fingerprints
    expected: list[int]

    @classmethod
    def now(cls, args: Sequence[Any], read: Sequence[Any]) -> _FoundFresh | None:
        if len(read) != 1:
            return None
        cache, _, entries = read[0]
        weights = [args[argument] for argument in entries]
        if not all(weight.is_cpu and local_part(weight) is weight and not weight.is_inference() for weight in weights):
            return None
        fingerprints = Fingerprints()
        seen = [(argument, version(weight), weight.data_ptr()) for argument, weight in zip(entries, weights)]
        return cls(cache, cache.changes, cache.state.epoch, seen, fingerprints, fingerprints(weights))

    def holds(self, args: Sequence[Any]) -> bool:
        if self.cache.changes != self.changes or self.cache.state.epoch != self.epoch:
            return False
        return are_as_seen(args, self.seen) and self.fingerprints.again() == self.expected


def open_weights(gm: fx.GraphModule, slots: GraphSlots, rules: Rules) -> GraphWeights | None:
    """The copies to offer to a graph, where the model has a cache."""
    if slots.state.weights is None:
        return None
    inputs = [(node, real_input(node)) for node in gm.graph.find_nodes(op="placeholder")]
    # A copy that stays would hold on every rank what FSDP shards, and gathering leaves version counters as they are.
    sharded = gathered_by_fsdp()
    candidates = {
        index: item
        for index, (node, item) in enumerate(inputs)
        if _is_matrix(item) and id(item) not in sharded and any(not _looks_up(user) for user in node.users)
    }
    return GraphWeights(slots, candidates, rules)


def _without_memory(tensor: Tensor) -> Tensor:
    """What stands for a copy that the graph does not read: the code wants as many tensors as it was compiled with."""
    tensor.untyped_storage().resize_(0)
    return tensor


def _is_matrix(item: Any) -> bool:
    if not isinstance(item, nn.Parameter):
        return False
    matrix = local_part(item)
    return matrix.dim() == 2 and matrix.dtype in DTYPES and matrix.is_contiguous() and matrix.numel() > 0


def _looks_up(user: fx.Node) -> bool:
    return any(name in str(user.target) for name in LOOKUPS)
