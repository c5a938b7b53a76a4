"""Packed weights as parameters of bytes, so that FSDP2 shards them: ``shardable(packed)``.

    fp8_compile.pack(model)
    fp8_compile.shardable(model)
    lora = peft.get_peft_model(model, LoraConfig(...))
    fully_shard(block)                              for each block: codes are gathered when it runs

FSDP2 shards parameters along their first dimension, and casts those of floats. So codes, and the block scales of NVFP4,
become parameters uint8 [units, bytes] without a gradient. A unit is as many rows as a kernel's order mixes: 16 rows of
NVFP4 in the memory of a CPU, otherwise one row. So each shard is a matrix of its own, which can be put into the
standard order for a checkpoint without the others. The other parts, one number per row or matrix, stay buffers, which
every rank has whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8_compile.kernels.nvfp4.ops import INTERLEAVED, STANDARD, SWIZZLED, from_standard, to_standard
from fp8_compile.torch_internals.modules import is_sharded, like_local, local_part, whole_of

from .linear_layers import unwrapped
from .packed_weight import NVFP4Parts, PackedWeight

PARTS = ("codes", "block_scales")
ROWS = {STANDARD: 1, INTERLEAVED: 16, SWIZZLED: 128}  # that a layout mixes


def shardable(model: nn.Module) -> list[str]:
    """Make the codes of a packed model parameters, in place, so that ``fully_shard`` shards them.

    Call it after ``pack`` or ``load_checkpoint`` and before ``fully_shard``, before or after adapters are added.
    Optimizers pass over them, because they need no gradient. Returns the names of the modules; a second call changes
    nothing.
    """
    root = unwrapped(model)
    modules = {name: one for name, one in root.named_modules() if isinstance(one, PackedWeight)}
    if not modules:
        raise ValueError(
            f"shardable: {type(root).__name__} has no packed weights; expected a model after fp8_compile.pack or "
            "load_checkpoint"
        )
    made: dict[int, nn.Parameter] = {}  # by id of the buffer: tied weights share them
    for module in modules.values():
        if isinstance(module, Shardable):
            continue
        rows = ROWS[module.layout] if isinstance(module, NVFP4Parts) else 1
        kind = type(module)
        wholes = {}
        for name in PARTS:
            if (part := module._buffers.pop(name, None)) is not None:
                wholes[name] = part.shape, part.dtype
                if id(part) not in made:
                    made[id(part)] = nn.Parameter(_units(part, rows), requires_grad=False)
                module._parameters[name] = made[id(part)]
        module.__class__ = _shardable_class(kind)
        assert isinstance(module, Shardable)
        module.wholes = wholes
    return list(modules)


def _units(part: Tensor, rows: int) -> Tensor:
    """A part as uint8 [units, bytes]; one unit where the rows are no whole number of them."""
    as_bytes = part.contiguous().view(torch.uint8)
    count = as_bytes.shape[:-1].numel()
    whole = as_bytes.shape[-2] % rows == 0
    return as_bytes.reshape(count // rows if whole else as_bytes[..., 0, 0].numel(), -1)


class Shardable(PackedWeight):
    """A packed module whose codes are parameters; ``shardable`` makes the class of each from the module's own."""

    own_class: type[PackedWeight]  # what it was before
    wholes: dict[str, tuple[torch.Size, torch.dtype]]  # of the parts that are parameters, as kernels read them

    @property
    def is_sharded(self) -> bool:
        return any(is_sharded(self._parameters[name]) for name in self.wholes)

    def matrix(self, *expert: int) -> Any:
        """The packed weight in the standard layout, gathered if it is sharded: all ranks have to ask for it."""
        held = dict(self._parameters)
        gathered: dict[str, Any] = {name: whole_of(held[name]) for name in self.wholes}
        self._parameters.update(gathered)
        try:
            return super().matrix(*expert)  # type: ignore[misc]
        finally:
            self._parameters.update(held)

    def memory_bytes(self) -> int:
        """How many bytes of the weight this rank has."""
        held = [self._parameters[name] for name in self.wholes]
        rest = [self._buffers[name] for name in self.packed if name not in self.wholes]
        return sum(local_part(one).nbytes for one in (*held, *rest) if one is not None)

    def use_layout(self, layout: str) -> None:
        """Store the weight in another layout; units of rows follow it."""
        assert isinstance(self, NVFP4Parts)
        if layout == self.layout:
            return
        if self.is_sharded:
            raise ValueError(f"a weight in the layout {self.layout!r} is sharded; move the model before fully_shard")
        parts = from_standard(*to_standard(self.codes, self.block_scales, self.layout), layout)
        self.layout = layout
        for name, part in zip(PARTS, parts):
            self._parameters[name].data = _units(part, ROWS[layout])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Units in the standard order of rows: they are the same on all devices, shard by shard."""
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        self._reorder(destination, prefix, to_standard)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._reorder(state_dict, prefix, from_standard)
        PackedWeight._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)

    def _reorder(self, parts: dict[str, Any], prefix: str, change: Any) -> None:
        """Change the order of rows in each unit of ``parts``, whatever shape they are in; they may be shards."""
        names = [prefix + name for name in PARTS]
        if not isinstance(self, NVFP4Parts) or self.layout == STANDARD or any(name not in parts for name in names):
            return
        locals_ = [local_part(parts[name]) for name in names]
        if not locals_[0].numel():
            return
        (shape, _), (of_scales, dtype) = (self.wholes[name] for name in PARTS)
        stack = () if shape[-2] % ROWS[self.layout] == 0 else (-1,)  # otherwise groups of rows end with a matrix
        rows = locals_[0].numel() // shape[-1] if not stack else shape[-2]
        codes = locals_[0].reshape(*stack, rows, shape[-1])
        scales = locals_[1].contiguous().view(torch.uint8).reshape(*stack, rows, of_scales[-1]).view(dtype)
        for name, one, part in zip(names, locals_, change(codes, scales, self.layout)):
            parts[name] = like_local(parts[name], part.view(torch.uint8).view(one.dtype).reshape(one.shape))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.own_class,), self.__dict__


def _shardable_class(own: type[PackedWeight]) -> type[PackedWeight]:
    if own not in _classes:
        fields: dict[str, Any] = {name: _part(name) for name in PARTS if name in own.packed}
        _classes[own] = type(own.__name__, (Shardable, own), {**fields, "own_class": own, "__module__": __name__})
    return _classes[own]


_classes: dict[type[PackedWeight], type[PackedWeight]] = {}


def _part(name: str) -> property:
    """A part as kernels read it: a view of the parameter, which FSDP2 has gathered while the module runs. Between runs
    it is the shard itself, which FSDP2 asks for by this name."""

    def get(module: Shardable) -> Tensor:
        (shape, dtype), held = module.wholes[name], module._parameters[name]
        assert held is not None
        return held if is_sharded(held) else held.view(dtype).view(shape)

    return property(get)


def _empty(own: type[PackedWeight]) -> nn.Module:
    """Make an instance for a copy or a pickle: a class that is made on demand has no name to be found by."""
    made = _shardable_class(own)
    return made.__new__(made)
