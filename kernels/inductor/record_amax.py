"""The lowering of ``kernels/record_amax.py``: on a GPU a store with mode "atomic_max", elsewhere a call.

A tile reduces itself and does one atomic. The functions at the end of this file teach Inductor that mode, for Triton,
and change nothing for other modes. Where they do not fit the installed torch, an amax is a call on a GPU, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.dependencies import StarDep
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import ops

from fp8_compile.kernels.record_amax import record_amax_op
from fp8_compile.torch_internals import patches

from .scatter import scatter_into

ATOMIC_MAX: Any = "atomic_max"  # a StoreMode
_fallback = fallback_handler(record_amax_op, add_to_fallback_set=False)


@register_lowering(record_amax_op, type_promotion_kind=None)
def _lowering(amaxes: Any, x: Any, slot: int) -> Any:
    device = x.get_device()
    if device.type == "cpu" or not patches.active("atomic_max"):
        return _fallback(amaxes, x, slot)
    amaxes.realize()
    load = x.make_loader()

    def magnitude_bits(index: Any) -> Any:
        # As integers: a maximum of floats loses NaN, in tl.max as in the hardware's atomic.
        return ops.to_dtype_bitcast(ops.abs(ops.to_dtype(load(index), torch.float32)), torch.int32, torch.float32)

    def place(index: Any) -> Any:
        return [slot]

    scatter_into(amaxes, magnitude_bits, x.get_size(), place, ATOMIC_MAX)
    return None


@patches.extends("atomic_max", "torch._inductor.codegen.triton.TritonKernel.store")
def _store(self: Any, original: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
    """Print an atomic max: one per tile."""
    if mode != ATOMIC_MAX:
        return original(self, name, index, value, mode)
    pointer = f"{self.args.output(name)}.to(tl.pointer_type(tl.int32), bitcast=True)"
    # After the loop of a reduction there is neither its dimension nor its mask.
    trees = [tree for tree in self.range_trees if self.inside_reduction or not tree.is_reduction]
    masks = [tree.mask_name() for tree in trees if not self._has_constant_mask(tree)]
    dense = f"tl.broadcast_to({value}, {self.dense_size_str()})"  # a value may lack a dimension that a mask has
    inside = f"tl.where({' & '.join(masks)}, {dense}, -1)" if masks else dense
    line = f"tl.atomic_max({pointer} + ({self.index_to_str(index)}), tl.max({inside}), sem='relaxed')"
    self.stores.writeline(DeferredLine(name, line))
    if not self.inside_reduction:
        self.outside_loop_vars.add(value)


@patches.extends("atomic_max", "torch._inductor.scheduler.Scheduler.fusable_read_and_write")
def _fusable_read_and_write(self: Any, original: Any, read: Any, write: Any, **options: Any) -> bool:
    """Two atomic maxima into one buffer may be in one kernel, in any order.

    The scheduler means to allow that for equal modes, but compares the name of the buffer after the second store with
    that after the first, and these always differ.
    """
    if isinstance(read, StarDep) and read.mode == write.mode == ATOMIC_MAX:
        return bool(read.name == self.mutation_renames.get(write.name, write.name))
    return bool(original(self, read, write, **options))
