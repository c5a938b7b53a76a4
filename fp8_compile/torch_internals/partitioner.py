"""Passes right after the split into forward and backward, before Inductor works on the halves.

Inductor's own place for passes on the halves, ``post_grad_custom_pre_pass``, comes after it has computed the value of
every node again, and it computes those that a pass has changed once more. Where a pass makes one node of ten, both are
cheaper after it.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

FIELD = "custom_partitioner_fn"  # of Inductor's configuration


class SplitAndShrink(CustomPartitionerFn):
    """The partitioner of the user or of Inductor, and then ``shrink`` on each half. ``key``: what it stands for in the
    key of Inductor's caches."""

    def __init__(self, shrink: Callable[[fx.Graph], None], key: str, of_user: CustomPartitionerFn | None) -> None:
        self.shrink, self.key, self.of_user = shrink, key, of_user

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        forward, backward = (self.of_user or min_cut_rematerialization_partition)(gm, joint_inputs, **kwargs)
        for half in (forward, backward):
            self.shrink(half.graph)
            half.recompile()
        return forward, backward

    def uuid(self) -> str | None:
        if self.of_user is None:
            return self.key
        known = self.of_user.uuid()
        return None if known is None else f"{self.key}{known}"

    def __reduce__(self) -> tuple[Callable[..., str], tuple[str]]:
        # Inductor's configuration, which this is part of, is pickled for the key of its caches.
        return str, (str(self.uuid()),)


def split_and_shrink(
    shrink: Callable[[fx.Graph], None], key: str | None, patches: Mapping[str, Any]
) -> dict[str, CustomPartitionerFn]:
    """The option for Inductor with which ``shrink`` runs on both halves; none while nothing is to be cached, which is
    what no ``key`` means."""
    from torch._inductor import config

    return {FIELD: SplitAndShrink(shrink, key, patches.get(FIELD, config.custom_partitioner_fn))} if key else {}
