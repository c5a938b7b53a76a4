"""Record the largest magnitude of a tensor in a slot, inside whatever kernel computes the tensor.

    amaxes[slot] = max(amaxes[slot], max |x|)        x: any shape; amaxes: [C] fp32; NaN wins over Inf over all numbers

A reduction of a whole tensor is a kernel of its own in Inductor, or two. Here it is a store: a pointwise value stored
to one place with mode "atomic_max", which Inductor fuses like any other store into the producer of x. A tile reduces
itself and does one atomic. Inductor 2.13 names that mode (``ops_handler.AtomicMode``) and does not implement it; the
two functions at the end of this file do, for Triton, and change nothing for other modes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.dependencies import StarDep
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V, ops

from fp8_compile.kernels.quantize import WHOLE, block_amax

from .extend import extend

ATOMIC_MAX = "atomic_max"


def record_amax(amaxes: torch.Tensor, x: torch.Tensor, slot: int) -> None:
    """The formula above in plain PyTorch."""
    bits = block_amax(x.reshape(1, -1), (WHOLE, WHOLE)).reshape(()).view(torch.int32)
    recorded = amaxes.data.view(torch.int32)
    recorded[slot] = torch.maximum(recorded[slot], bits)


_library = torch.library.Library("fp8_compile", "FRAGMENT")
_library.define("record_amax(Tensor(a!) amaxes, Tensor x, int slot) -> ()")
_library.impl("record_amax", record_amax, "CompositeExplicitAutograd")
torch.library.register_fake("fp8_compile::record_amax", lambda amaxes, x, slot: None, lib=_library)
record_amax_op = torch.ops.fp8_compile.record_amax.default
_fallback = fallback_handler(record_amax_op, add_to_fallback_set=False)


@register_lowering(record_amax_op, type_promotion_kind=None)
def _lowering(amaxes, x, slot):  # type: ignore[no-untyped-def]
    device = x.get_device()
    if device.type == "cpu":
        return _fallback(amaxes, x, slot)
    amaxes.realize()
    load = x.make_loader()

    def magnitude_bits(index: Any) -> Any:
        # As integers: a maximum of floats loses NaN, in tl.max as in the hardware's atomic.
        return ops.to_dtype_bitcast(ops.abs(ops.to_dtype(load(index), torch.float32)), torch.int32, torch.float32)

    scatter = ir.Scatter(
        device=device,
        dtype=amaxes.get_dtype(),
        inner_fn=magnitude_bits,
        ranges=list(x.get_size()),
        output_indexer=lambda index: [slot],
        scatter_mode=ATOMIC_MAX,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(amaxes), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    return None


@extend(TritonKernel, "store")
def _store(self, original, name, index, value, mode=None):  # type: ignore[no-untyped-def]
    """Print an atomic max: of a tile, one."""
    if mode != ATOMIC_MAX:
        return original(self, name, index, value, mode)
    pointer = f"{self.args.output(name)}.to(tl.pointer_type(tl.int32), bitcast=True)"
    # Behind the loop of a reduction there is neither its dimension nor its mask.
    trees = [tree for tree in self.range_trees if self.inside_reduction or not tree.is_reduction]
    masks = [tree.mask_name() for tree in trees if not self._has_constant_mask(tree)]
    dense = f"tl.broadcast_to({value}, {self.dense_size_str()})"  # a value may lack a dimension that a mask has
    inside = f"tl.where({' & '.join(masks)}, {dense}, -1)" if masks else dense
    line = f"tl.atomic_max({pointer} + ({self.index_to_str(index)}), tl.max({inside}), sem='relaxed')"
    self.stores.writeline(DeferredLine(name, line))
    if not self.inside_reduction:
        self.outside_loop_vars.add(value)


@extend(Scheduler, "fusable_read_and_write")
def _fusable_read_and_write(self, original, read, write, **options):  # type: ignore[no-untyped-def]
    """Two atomic maxima into one buffer may be in one kernel, in any order.

    The scheduler means to allow that for equal modes, but compares the name of the buffer after the second store with
    that after the first (torch 2.13), which differ always.
    """
    if isinstance(read, StarDep) and read.mode == write.mode == ATOMIC_MAX:
        return read.name == self.mutation_renames.get(write.name, write.name)
    return original(self, read, write, **options)
