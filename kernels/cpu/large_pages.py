"""Memory for weights in pages of 2 MB, which a core reads about one and a half times as fast as pages of 4 KB.

A product with few rows reads its weight once, from end to end. In pages of 4 KB, an address is looked up for every 64
cache lines, and the CPU's own fetching ahead ends with each page. Linux gives larger pages to memory that asks for them
(``madvise``), where ``/sys/kernel/mm/transparent_hugepage/enabled`` says "madvise", the default, or "always".

Weights follow one another in regions of at least 32 MB. A region is returned to the system when none of its weights is
used any more.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes, of x86-64
REGION = 32 << 20
LEAST = 64 << 10  # bytes of a weight; a smaller one is in a cache, or not worth the call
LINE = 64


class _Region:
    """Memory in large pages, of which the first ``used`` bytes are taken."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.used = -ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) % PAGE
        self.end = self.used + size

    def take(self, size: int) -> Tensor:
        """Bytes that are a storage of their own, which keeps the region alive."""
        start, self.used = self.used, self.used + -(-size // LINE) * LINE
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=start)


_region: _Region | None = None
_lock = threading.Lock()


def in_large_pages(x: Tensor) -> Tensor:
    """A copy of ``x`` in large pages; ``x`` itself where that is no use (a small one, not in a CPU's memory, another
    system) or where the system has no memory to map."""
    global _region
    if not hasattr(mmap, "MADV_HUGEPAGE") or x.device.type != "cpu" or x.nbytes < LEAST:
        return x
    with _lock:
        try:
            if _region is None or _region.used + x.nbytes > _region.end:
                _region = _Region(max(REGION, -(-x.nbytes // PAGE) * PAGE))
            taken = _region.take(x.nbytes)
        except OSError:  # a kernel without large pages says so to madvise
            return x
    return taken.view(x.dtype).view(x.shape).copy_(x)
