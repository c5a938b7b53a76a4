"""Keep what fusion has removed out of Inductor's estimate of peak memory (``patches.TABLE["peak_estimate"]``).

A buffer that is free is kept for a later one of its size if that does not raise the estimated peak. The estimate counts
values that exist in a fused kernel's registers only, so that dead gradients are kept through the next layer. When it is
made, the kernels are written and the graph knows which buffers were removed. Graphs without an operation of ours are
left as they are.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from fp8_compile.torch_internals import patches

from .our_graphs import is_ours


@patches.extends("peak_estimate", "torch._inductor.codegen.wrapper.EfficientPeakEstimate.__init__")
def _without_removed(self: Any, original: Any) -> None:
    if is_ours(V.graph.graph):
        buffers: dict[str, Any] = V.graph.scheduler.name_to_buf
        for name in V.graph.removed_buffers & buffers.keys():
            planned = buffers[name].mpi_buffer
            planned.size_alloc = planned.size_free = 0
    original(self)
