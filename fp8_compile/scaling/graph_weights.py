"""The cached weights that one graph is compiled with, and the check before each of its runs that they are fresh."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Sequence

import torch
from torch import Tensor, fx, nn

from fp8_compile.passes.graph.cached_weights import CODES, KNOWN, TRANSPOSED, Use, weight_buffer
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.graph.slot import FORWARD, Place, Slot
from fp8_compile.torch_internals.dynamo import real_input
from fp8_compile.torch_internals.graphs import is_fake
from fp8_compile.torch_internals.modules import gathered_by_fsdp, local_part

from .cached_weight import CachedWeight
from .graph_slots import GraphPool, use_from_list
from .weight_cache import WeightCache
from .weight_sampler import Sampler

# Ops that look a weight up and do not multiply by it; all else may end in a matmul.
LOOKUPS = ("embedding",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GraphWeights:
    """The copies offered to a graph: of every matrix among its parameters that a matmul may read. When the graph is
    compiled it is known which are read; the memory of the others is freed."""

    def __init__(self, cache: WeightCache, pool: GraphPool, candidates: dict[int, Tensor], rules: Rules) -> None:
        """``candidates``: argument of the graph -> parameter."""
        self.cache, self.pool, self.candidates = cache, pool, candidates
        self.both_layouts = rules.needs_k_contiguous and not rules.reads_any_layout
        self.entries = {
            argument: cache.entry(weight, rules.forward.dtype, transposed=self.both_layouts)
            for argument, weight in candidates.items()
        }
        self.uses: dict[int, Use] = {}

    @property
    def fingerprint(self) -> str:
        """What code depends on: with the pool's, which weights are offered and what was decided about them before."""
        return repr([(index, entry.slot, entry.via) for index, entry in self.entries.items()] + [self.both_layouts])

    def buffers(self) -> dict[str, Tensor]:
        """Name in the graph -> tensor."""
        named = {}
        for argument, entry in self.entries.items():
            named[weight_buffer(argument, CODES)] = entry.codes
            if entry.transposed is not None:
                named[weight_buffer(argument, TRANSPOSED)] = entry.transposed
        for table in self.pool.tables(FORWARD):
            named[weight_buffer(table, KNOWN)] = self.cache.writer.known_scales(table)
        return named

    def use(self, use: Use) -> Place | None:
        entry = self.entries[use.argument]
        if entry.slot is None:
            entry.slot, entry.via = self.pool.slot_of(use.tensor), use.via
            entry.place = self.pool.place(use.tensor)
        if entry.via != use.via:
            return None  # half of the model under autocast, half not: one copy is cached
        self.uses[use.argument] = use
        return self.pool.place_of(entry.slot, FORWARD)

    @property
    def slots(self) -> set[Slot]:
        """Of the copies that the graph reads."""
        return {slot for argument in self.uses if (slot := self.entries[argument].slot) is not None}

    def finish(self) -> None:
        """The graph is compiled: drop what it and no other graph reads."""
        for argument, entry in self.entries.items():
            if argument in self.uses:
                self.cache.keep(entry)
            elif entry.slot is None:
                self.cache.drop(self.candidates[argument])

    def to_list(self) -> list[Any]:
        """Plain data for the report cache: what code from Inductor's cache reads."""
        rows = []
        for use in self.uses.values():
            via = str(use.via).removeprefix("torch.") if use.via else None
            rows.append([use.argument, via, *dataclasses.astuple(use.tensor)])
        return rows

    def adopt(self, stored: Iterable[Any]) -> None:
        for argument, via, *tensor in stored:
            dtype = getattr(torch, via) if via else None
            place = self.use(Use(argument, use_from_list(tensor), dtype))
            assert place is not None, "the cache's key covers what was decided about weights before"


class FreshWeights:
    """Has the copies that a graph reads renewed before it runs, where their weights have changed."""

    def __init__(self, weights: GraphWeights) -> None:
        self.cache, self.sampler = weights.cache, Sampler(weights.cache)
        self.read = {argument: weights.entries[argument] for argument in weights.uses}

    def __call__(self, args: Sequence[Any]) -> None:
        """``args``: of the graph."""
        weights: dict[CachedWeight, Tensor] = {entry: args[argument] for argument, entry in self.read.items()}
        if not any(map(is_fake, weights.values())):
            self.cache.ensure_fresh(weights, self.sampler)


def open_weights(gm: fx.GraphModule, pool: GraphPool, rules: Rules) -> GraphWeights | None:
    """The copies to offer to a graph, where the model has a cache."""
    cache = pool.state.weights
    if cache is None:
        return None
    inputs = [(node, real_input(node)) for node in gm.graph.find_nodes(op="placeholder")]
    # A copy that stays would hold on every rank what FSDP shards, and gathering leaves version counters as they are.
    sharded = gathered_by_fsdp()
    candidates = {
        index: item
        for index, (node, item) in enumerate(inputs)
        if _is_matrix(item) and id(item) not in sharded and any(not _looks_up(user) for user in node.users)
    }
    return GraphWeights(cache, pool, candidates, rules)


def _is_matrix(item: Any) -> bool:
    if not isinstance(item, nn.Parameter):
        return False
    matrix = local_part(item)
    return matrix.dim() == 2 and matrix.dtype in DTYPES and matrix.is_contiguous() and matrix.numel() > 0


def _looks_up(user: fx.Node) -> bool:
    return any(name in str(user.target) for name in LOOKUPS)
