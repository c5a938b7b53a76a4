"""A driver for Triton that launches nothing: kernels are compiled and prepared as on a GPU, and launches are counted.

    with stub_driver(quantize_many_kernel) as launches:
        quantize()
    launches     one for each: the kernel's name, its grid, the arguments

What is measured around it is the host time of a launch, but for the microseconds that the real driver takes.
"""

from __future__ import annotations

import collections
import contextlib
import types
from typing import Any, Iterator, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class StubLaunch(NamedTuple):
    """What a driver was asked to launch."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class _Driver:
    """Answers for Triton's driver, and keeps what it is asked to launch."""

    def __init__(self, capability: int) -> None:
        self.target, self.launches = GPUTarget("cuda", capability, 32), list[StubLaunch]()
        properties = {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}
        self.utils = types.SimpleNamespace(
            load_binary=lambda name, *others: (object(), name, 32, 0, 1024),  # module, function, registers, ...
            get_device_properties=lambda device: properties,
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: str, *others: Any) -> None:
            self.launches.append(StubLaunch(function, (x, y, z), others[4:]))  # after metadata and hooks

        return launch


@contextlib.contextmanager
def stub_driver(*kernels: JITFunction, capability: int = 90) -> Iterator[list[StubLaunch]]:
    """Inside, these kernels are compiled for that GPU, and nothing is launched."""
    driver = _Driver(capability)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        for kernel in kernels:
            # What is compiled inside launches nothing, ever: it must not be found afterwards.
            caches = collections.defaultdict(lambda kernel=kernel: kernel.create_binder())
            stack.enter_context(mock.patch.object(kernel, "device_caches", caches))
        yield driver.launches
