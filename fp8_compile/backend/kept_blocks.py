"""Which modules of a compiled model are in blocks that stay in high precision: ``keep_first`` and ``keep_last``."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping

from torch import nn

from fp8_compile.block_stacks import WHAT_IT_IS, Stack, explicit_patterns, stacks_of
from fp8_compile.config import Config

from .module_names import visible_roots, whole_model

log = logging.getLogger("fp8_compile")


@dataclasses.dataclass(frozen=True)
class KeptBlocks:
    """``names``: of the modules in them, as graphs have them, and why; "" is the compiled module itself.
    ``asked_for``: patterns of include that name some blocks and not others, and win."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    asked_for: tuple[str, ...] = ()


NOTHING = KeptBlocks()


def kept_in_graph(config: Config, *, strict: bool) -> KeptBlocks:
    """For what Dynamo is compiling. ``strict``: an error where blocks were asked for and there are none."""
    if config.kept_blocks == (0, 0):
        return NOTHING
    found = [kept_in(root, config, prefix) for prefix, root in visible_roots()]
    for _, root in visible_roots():
        _check(root, config, strict=strict)
    names = {name: why for one in found for name, why in one.names.items()}
    return KeptBlocks(names, tuple(dict.fromkeys(pattern for one in found for pattern in one.asked_for)))


def kept_in(root: nn.Module, config: Config, prefix: str = "") -> KeptBlocks:
    """For a compiled module, which may be a part of a model: then its place is looked up there, in the largest module
    with it that one of the running functions has at hand."""
    if config.kept_blocks == (0, 0):
        return NOTHING
    whole = whole_model(root)
    stacks = stacks_of(whole)
    why, others = dict[int, str](), set[int]()
    for stack in stacks:
        kept = _kept(stack, stacks, config)
        for name, block in stack.blocks.items():
            inside = {id(module) for module in block.modules()}
            if name in kept:
                why |= dict.fromkeys(inside, kept[name])
            else:
                others |= inside
    names = {
        ".".join(part for part in (prefix, name) if part): why[id(module)]
        for name, module in root.named_modules()
        if id(module) in why and id(module) not in others  # a layer that all blocks share is not one of the last
    }
    # Patterns are about names in the compiled module: those of a block by itself do not say which block it is.
    return KeptBlocks(names, explicit_patterns(root, config.include) if root is whole else ())


def _kept(stack: Stack, stacks: list[Stack], config: Config) -> dict[str, str]:
    return stack.kept(*config.kept_blocks, alone=len(stacks) == 1)


_told: weakref.WeakSet[type] = weakref.WeakSet()  # classes of models of which the user was told


def _check(root: nn.Module, config: Config, *, strict: bool) -> None:
    whole = whole_model(root)
    stacks = stacks_of(whole)
    asked = ", ".join(
        f"{name}={share!r}"
        for name in ("keep_first", "keep_last")
        if (share := getattr(config, name)) is not None and share != 0
    )
    model = type(whole).__name__
    if asked and stacks and all(len(_kept(stack, stacks, config)) == len(stack.blocks) for stack in stacks):
        sizes = " and ".join(str(len(stack.blocks)) for stack in stacks)
        message = f"{asked} leaves none of the {sizes} blocks of {model} to rewrite; keep fewer"
    elif asked and not stacks:
        message = (
            f"{asked}: {model} has no stack of equal blocks, which would be {WHAT_IT_IS}. If it is a block of a model "
            "that the running functions do not have at hand, exclude= leaves layers alone by their names; otherwise "
            "drop the option"
        )
    elif not asked and not stacks:
        if type(whole) not in _told:
            _told.add(type(whole))
            log.warning(
                "recipe=%r leaves the last 15 %% of a model's blocks in high precision, but %s has no stack of equal "
                "blocks (%s), and no running function has a model at hand that it is a block of: nothing is kept. "
                "keep_last=0 says that this is meant",
                config.recipe,
                model,
                WHAT_IT_IS,
            )
        return
    else:
        return
    if strict:
        raise ValueError(message)
    log.warning("%s", message)
