"""The stacks of equal blocks in a model, and which of their blocks stay in high precision.

A *block* is a module that has layers inside. A *stack* is a run of blocks, one after the other, in an
``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict``, where each block's class occurs at least twice: twelve
decoder layers, also where two kinds of them alternate. An embedding before them in the same container, or a head after
them, is not part of the stack. What is inside a block is not searched: the experts of a layer are not a stack. Several
stacks, as of an encoder and a decoder, are counted each by itself.

    number    that many blocks
    fraction  of the blocks of the stack, rounded to the nearest whole number, halves up:
              0.15 is none of 3, one of 4 to 9, two of 10 to 16
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from .torch_internals.modules import unwrap

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
WHAT_IT_IS = "blocks of one class, with layers inside, in an nn.ModuleList, nn.Sequential or nn.ModuleDict"


@dataclasses.dataclass(frozen=True)
class Stack:
    """Equal blocks by their dotted names, in order."""

    name: str  # of the container
    blocks: Mapping[str, nn.Module]

    def kept(self, first: float, last: float, *, alone: bool) -> dict[str, str]:
        """Which blocks stay in high precision: name -> why. ``alone``: the model has no other stack."""
        names, where = list(self.blocks), "" if alone else f" in {self.name or 'the model'}"
        heads, tails = (number_of(share, len(names)) for share in (first, last))
        found = dict.fromkeys(names[:heads], _reason("first", heads, len(names)) + where)
        last_reason = _reason("last", tails, len(names)) + where
        return found | dict.fromkeys(names[len(names) - tails :], last_reason)


def number_of(share: float, blocks: int) -> int:
    """How many of so many blocks a number or a fraction stands for."""
    if isinstance(share, int):
        return min(share, blocks)
    return math.floor(share * blocks + 0.5 + 1e-9)  # 0.15 in binary is a little less


def stacks_of(model: nn.Module) -> list[Stack]:
    """The outermost stacks of a model."""
    return list(_stacks(model, ""))


def kept_blocks(model: nn.Module, first: float, last: float) -> dict[str, str]:
    """The blocks of a model that stay in high precision: dotted name -> why."""
    stacks = stacks_of(model)
    return {
        name: why for stack in stacks for name, why in stack.kept(first, last, alone=len(stacks) == 1).items()
    }


def explicit_patterns(model: nn.Module, include: Sequence[str]) -> tuple[str, ...]:
    """The patterns that name some blocks of a stack and not others: they ask for these blocks."""
    found = dict.fromkeys(
        pattern for stack in stacks_of(model) for pattern in include if pattern != "*" and _is_choosy(pattern, stack)
    )
    return tuple(found)


def _is_choosy(pattern: str, stack: Stack) -> bool:
    named = [bool(fnmatch.filter(_names_in(name, block), pattern)) for name, block in stack.blocks.items()]
    return any(named) and not all(named)


def _names_in(name: str, block: nn.Module) -> list[str]:
    inside = [*(inner for inner, _ in block.named_modules()), *(inner for inner, _ in block.named_parameters())]
    return [_join(name, inner) for inner in inside]


def _stacks(module: nn.Module, name: str) -> Iterator[Stack]:
    children = {_join(name, own): unwrap(child) for own, child in module.named_children()}
    blocks: set[str] = set()
    if isinstance(module, CONTAINERS):
        for run in _runs(children):
            blocks.update(run)
            yield Stack(name, {one: children[one] for one in run})
    for child_name, child in children.items():
        if child_name not in blocks:
            yield from _stacks(child, child_name)


def _runs(children: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """Blocks that follow each other, of classes that occur more than once."""
    classes = Counter(type(child) for child in children.values())
    run: list[str] = []
    for name, child in [*children.items(), ("", None)]:
        if child is not None and classes[type(child)] > 1 and _is_block(child):
            run.append(name)
            continue
        if len(run) > 1:
            yield run
        run = []


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, CONTAINERS) and (not isinstance(module, nn.Sequential) or stacks_of(module)):
        return False  # a stack itself, or what several are in
    has_layers = any(True for _ in module.children())
    return has_layers and any(parameter.dim() > 1 for parameter in module.parameters())


def _reason(which: str, kept: int, blocks: int) -> str:
    return f"one of the {which} {kept} of {blocks} blocks" if kept != 1 else f"the {which} of {blocks} blocks"


def is_kept(reason: str) -> bool:
    """True for the reason of a layer in a block that stays in high precision."""
    return re.match(r"(one of )?the (first|last) (\d+ )?of \d+ blocks", reason) is not None


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)
