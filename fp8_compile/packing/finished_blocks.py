"""Blocks of a model whose layers are all packed: when the calibration's batches run again, they are not computed again.

    batches run for every group of layers, as far as the group. A block of a ``ModuleList`` in which nothing is left to
    pack is computed once more and returns the same from then on: of a model of L blocks, packed in G groups each, about
    G blocks are computed per block instead of G * L / 2.

Every finished block keeps its own output, so that whatever else reads it, such as a decoder's cross-attention, gets
what it would get. ``LIMIT`` bounds what is kept; blocks beyond it are computed each time.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from fp8_compile.torch_internals.graphs import pytree

LIMIT = 4 << 30  # bytes


class FinishedBlocks:
    def __init__(self, root: nn.Module, names: Iterable[str]) -> None:
        """``names``: of all weights that are to be packed."""
        lists = [name for name, module in root.named_modules() if isinstance(module, nn.ModuleList)]
        outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        self.blocks: dict[str, nn.Module] = {
            f"{name}.{index}": block
            for name in outermost
            for index, block in enumerate(root.get_submodule(name).children())
        }
        self.left = {block: {name for name in names if name.startswith(f"{block}.")} for block in self.blocks}
        self.finished: list[str] = []
        self.outputs: dict[tuple[str, int], Any] = {}  # by block and batch
        self.bytes = 0

    def packed(self, names: Iterable[str]) -> None:
        """These weights have been packed."""
        for block, left in self.left.items():
            if left and not (left := left.difference(names)):
                self.finished.append(block)
            self.left[block] = left

    @contextlib.contextmanager
    def remembering(self, batch: int) -> Iterator[None]:
        """Run a batch in this context: finished blocks return what they returned for it, or are computed and kept."""
        with contextlib.ExitStack() as changes:
            for name in self.finished:
                block = self.blocks[name]
                if (name, batch) in self.outputs:
                    changes.enter_context(_replaced(block, self._recall(name, batch)))
                elif self.bytes < LIMIT:
                    changes.enter_context(_replaced(block, self._keep(name, batch, block.forward)))
            yield

    def _recall(self, name: str, batch: int) -> Callable[..., Any]:
        def forward(*_: Any, **__: Any) -> Any:
            # A copy: what comes after the block may write to it.
            return pytree.tree_map_only(Tensor, torch.clone, self.outputs[name, batch])

        return forward

    def _keep(self, name: str, batch: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            result = compute(*args, **kwargs)
            if calls == 1:
                self.outputs[name, batch] = pytree.tree_map_only(Tensor, torch.clone, result)
                kept = pytree.tree_leaves(self.outputs[name, batch])
                self.bytes += sum(one.nbytes for one in kept if isinstance(one, Tensor))
            else:  # called again, with other inputs perhaps: it is computed from now on
                self.outputs.pop((name, batch), None)
                self.finished = [other for other in self.finished if other != name]
            return result

        return forward


@contextlib.contextmanager
def _replaced(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(block).get("forward")
    block.forward = forward
    try:
        yield
    finally:
        del block.forward
        if before is not None:
            block.forward = before
