"""Which operations are called, as a device would be asked for them.

    with CalledOps() as ops:
        ...
    ops.from_the_host        whether a tensor was made from numbers: a GPU gets those by a copy, which waits for it
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CalledOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: set[Any] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(op)
        return op(*args, **(kwargs or {}))

    @property
    def from_the_host(self) -> bool:
        assert self.called
        return torch.ops.aten.lift_fresh.default in self.called
