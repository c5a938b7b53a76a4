"""llama.cpp's matrix x vector, through the C interface of the ggml libraries that llama-cpp-python installs.

Each weight is a plain ggml tensor (llama.cpp lays some types out anew when it loads a model; that is not measured).
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import time
from typing import Callable

NUMBERS = {"nvfp4": 40, "q4_0": 2, "q4_K": 12, "bf16": 30}  # of ggml's types; GGUF files have them, so they stay
_FP32 = 0


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The two libraries that are needed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        declared = {
            "ggml_init": (pointer, (_InitParams,)),
            "ggml_free": (None, (pointer,)),
            "ggml_new_tensor_2d": (pointer, (pointer, integer, size, size)),
            "ggml_mul_mat": (pointer, (pointer, pointer, pointer)),
            "ggml_new_graph": (pointer, (pointer,)),
            "ggml_build_forward_expand": (None, (pointer, pointer)),
            "ggml_get_data": (pointer, (pointer,)),
            "ggml_nbytes": (ctypes.c_size_t, (pointer,)),
            "ggml_type_name": (ctypes.c_char_p, (integer,)),
        }
        for name, (result, arguments) in declared.items():
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_graph_compute_with_ctx.argtypes = (pointer, pointer, integer)
        self.cpu.ggml_cpu_init()

    def has(self, type_name: str) -> bool:
        """Older libraries lack the newer types."""
        return (self.base.ggml_type_name(NUMBERS[type_name]) or b"").lower() == type_name.lower().encode()

    def product(self, type_name: str, n: int, k: int, m: int, copies: int, threads: int) -> Callable[[], float]:
        """A function that multiplies by ``copies`` different weights and returns the seconds that one took."""
        size = copies * (n * k * 2 + n * m * 4) + m * k * 8 * (copies + 2) + (64 << 20)
        context = self.base.ggml_init(_InitParams(size, None, False))
        x = self._filled(context, _FP32, k, m)
        graph = self.base.ggml_new_graph(context)
        for _ in range(copies):
            weight = self._filled(context, NUMBERS[type_name], k, n)
            self.base.ggml_build_forward_expand(graph, self.base.ggml_mul_mat(context, weight, x))

        def run() -> float:
            start = time.perf_counter()
            status = self.cpu.ggml_graph_compute_with_ctx(context, graph, threads)
            assert status == 0, status
            return (time.perf_counter() - start) / copies

        return run

    def _filled(self, context: int, type_number: int, k: int, rows: int) -> int:
        """Written to, so that its pages are there; as any type's scales these bytes are a moderate number."""
        tensor = self.base.ggml_new_tensor_2d(context, type_number, k, rows)
        ctypes.memset(self.base.ggml_get_data(tensor), 0x33, self.base.ggml_nbytes(tensor))
        return tensor


def find(folder: str | None = None) -> Ggml | None:
    """ggml from a folder with its libraries, or llama-cpp-python's; None where there is neither."""
    if folder is not None:
        return Ggml(pathlib.Path(folder))
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return None
    return Ggml(pathlib.Path(found.origin).parent / "lib")
