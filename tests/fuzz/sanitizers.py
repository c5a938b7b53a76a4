"""Random calls of every C++ entry point, compiled with the address and undefined-behaviour sanitizers.

    python tests/fuzz/sanitizers.py --seconds 300               every instruction set that this machine can run
    python tests/fuzz/sanitizers.py --seconds 10 --isa avx2     one

Sizes, strides, dtypes and values (NaN and Inf among them) are random; every array is an allocation of its own that ends
where the kernel must stop, so that one byte too far is found. The calls run in a process of their own with the
sanitizers' libraries loaded first. It imports no torch: that would take longer than the calls.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable

import numpy as np

SANITIZE = ("-fsanitize=address,undefined", "-fsanitize-recover=address,undefined", "-fno-omit-frame-pointer")
FLAGS = ("-O1", "-g1", "-std=c++17", "-fopenmp", "-fPIC", "-fno-trapping-math", "-fno-math-errno", *SANITIZE)
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 63, 64, 65, 96, 127, 128, 129, 200, 257, 300)
DEEP = (*SIZES, 511, 513, 1025, 2100)  # sums over several blocks of k
FINDINGS = ("ERROR: AddressSanitizer", "runtime error:")


@dataclasses.dataclass
class Report:
    """What a run did on one instruction set."""

    isa: str
    calls: dict[str, int]
    shapes: int
    findings: list[str]

    def __str__(self) -> str:
        made = ", ".join(f"{name} {count}" for name, count in sorted(self.calls.items()))
        counts = f"{sum(self.calls.values())} calls, {self.shapes} shapes, {len(self.findings)} findings"
        head = f"{self.isa}: {counts} ({made})"
        return "\n  ".join([head, *self.findings])


class Fuzzer:
    """Random arguments for each entry point of a library."""

    def __init__(self, kernels: ctypes.CDLL, seed: int) -> None:
        self.kernels, self.random, self.numbers = kernels, random.Random(seed), np.random.default_rng(seed)
        self.calls: collections.Counter[str] = collections.Counter()
        self.shapes: set[tuple[Any, ...]] = set()

    def call(self, name: str, *arguments: Any) -> int:
        self.calls[name] += 1
        self.shapes.add((name, *(one for one in arguments if isinstance(one, int))))
        return getattr(self.kernels, name)(*map(_as_c, arguments))

    def size(self) -> int:
        return self.random.choice(SIZES)

    def bytes(self, count: int) -> np.ndarray:
        return self.numbers.integers(0, 256, count, dtype=np.uint8)

    def floats(self, count: int, *, special: bool = True) -> np.ndarray:
        made = self.numbers.standard_normal(count).astype(np.float32)
        if special and count and self.random.random() < 0.3:
            made[self.random.randrange(count)] = self.random.choice((np.nan, np.inf, -np.inf, 0.0, 1e-45, 3e38))
        return made

    def elements(self, count: int, dtype: int) -> np.ndarray:
        return self.floats(count) if dtype == 0 else self.bytes(2 * count)

    def matrix(self, rows: int, cols: int, dtype: int) -> tuple[np.ndarray, int]:
        """Rows that are contiguous, and from one to the next; it ends with the last element."""
        stride = cols + self.random.choice((0, 0, 1, 5, 16))
        return self.elements(_extent(rows, cols, stride, 1), dtype), stride

    def codes(self, rows: int, cols: int) -> tuple[np.ndarray, int, int]:
        """A matrix of bytes, by rows or by columns, and its strides."""
        apart = self.random.choice((0, 0, 1, 3, 16))
        stride, k_stride = (cols + apart, 1) if self.random.random() < 0.6 else (1, rows + apart)
        return self.bytes(_extent(rows, cols, stride, k_stride)), stride, k_stride

    def threads(self) -> int:
        return self.random.choice((1, 1, 2, 3))

    def dtype(self) -> int:
        return self.random.randrange(3)

    # One method per entry point, of its name.

    def fp8_probe(self) -> None:
        assert self.call("fp8_probe") == 1

    def fp8_scales(self) -> None:
        rows, cols, axis, dtype = self.size(), self.size(), self.random.randrange(3), self.dtype()
        made = [np.empty((1, rows, cols)[axis], np.float32) for _ in range(2)]
        x, e5m2 = self.elements(rows * cols, dtype), self.random.randrange(2)
        self.call("fp8_scales", x, dtype, rows, cols, axis, e5m2, *made, self.threads())

    def fp8_quantize(self) -> None:
        rows, cols, axis, dtype = self.size(), self.size(), self.random.randrange(3), self.dtype()
        x, scale, codes = self.elements(rows * cols, dtype), self.floats((1, rows, cols)[axis]), self.bytes(rows * cols)
        e5m2 = self.random.randrange(2)
        self.call("fp8_quantize", x, dtype, rows, cols, axis, scale, e5m2, codes, self.threads())

    def fp8_inputs(self) -> None:
        rows, cols, dtype, known = self.size(), self.size(), self.dtype(), self.random.random() < 0.5
        x, stride = self.matrix(rows, cols, dtype)
        scales = np.empty(1 if known else rows, np.float32)
        given = (x, dtype, rows, cols, stride, self.floats(1) if known else None)
        self.call("fp8_inputs", *given, self.bytes(rows * cols), scales, self.threads())

    def fp8_delayed(self) -> None:
        count, dtype = self.size() * self.size(), self.dtype()
        scale = self.floats(1) if self.random.random() < 0.5 else np.zeros(1, np.float32)
        codes = self.bytes(count) if self.random.random() < 0.7 else None
        e5m2, largest = self.random.randrange(2), np.empty(1, np.float32)
        x = self.elements(count, dtype)
        self.call("fp8_delayed", x, dtype, count, e5m2, scale, codes, largest, self.threads())

    def fp8_update_scales(self) -> None:
        slots, length = self.size(), max(self.size(), 1)
        counts = self.numbers.integers(-3, 2000, (10, slots), dtype=np.int32)
        counts[5:] = self.numbers.integers(0, 4, (5, slots), dtype=np.int32)  # exponents and flags
        state = self.floats(slots), self.floats(slots * length), self.floats(2 * slots), counts
        rule = (self.random.randrange(4), self.random.choice((1, 3)))
        room, known = np.array([self.random.randrange(9)], dtype=np.int32), self.floats(2 * slots)
        self.call("fp8_update_scales", slots, length, *state, room, known, 448.0, 480.0, 1.75, 6, *rule)

    def fp8_scaled_mm(self) -> None:
        m, n, k = self.size(), self.size(), self.random.choice(DEEP)
        left, left_stride, left_k = self.codes(m, k)
        right, right_stride, right_k = self.codes(n, k)
        scales = [*self._scales(m, k), *self._scales(n, k)]
        dtype = self.dtype()
        bias = self.floats(n) if self.random.random() < 0.5 else None
        out, out_stride = self.matrix(m, n, dtype)
        e5m2 = self.random.randrange(2), self.random.randrange(2)
        self.call(
            "fp8_scaled_mm",
            *(m, n, k, left, left_stride, left_k, e5m2[0], *scales[:4]),
            *(right, right_stride, right_k, e5m2[1], *scales[4:]),
            *(bias, out, dtype, out_stride, self.random.randrange(2), self.threads()),
        )

    def _scales(self, lines: int, k: int) -> tuple[np.ndarray | None, int, int, int]:
        """Scales of all, of lines, of 128 k's of each line or of 128 lines; strides, along k too; lines that share."""
        blocks, kind = -(-k // 128), self.random.randrange(4)
        if kind == 0:
            return self.floats(1), 0, 0, 1
        rows, cols = {1: (lines, 1), 2: (lines, blocks), 3: (-(-lines // 128), blocks)}[kind]
        shared = 1 if rows in (1, lines) else 128
        made = self.floats(rows * cols) if rows * cols else None  # as torch has it: nothing is nowhere
        return made, cols if rows > 1 else 0, 1 if cols > 1 else 0, shared

    def fp8_mx_mm(self) -> None:
        m, n, k, dtype = self.size(), self.size(), self.random.choice(DEEP), self.dtype()
        left, right = ((*self.codes(lines, k), *self._block_scales(lines, k, 32)) for lines in (m, n))
        bias = self.floats(n) if self.random.random() < 0.5 else None
        out, out_stride = self.matrix(m, n, dtype)
        self.call("fp8_mx_mm", m, n, k, *left, *right, bias, out, dtype, out_stride, self.threads())

    def _block_scales(self, lines: int, k: int, size: int) -> tuple[np.ndarray, int, int, int]:
        """Scales of blocks along k, of each line or of square tiles; strides, along k too; lines that share."""
        blocks, shared = -(-k // size), self.random.choice((1, size))
        return self.bytes(-(-lines // shared) * blocks), blocks, 1, shared

    def fp8_mx_quantize(self) -> None:
        rows, cols, dtype = self.size(), self.size(), self.dtype()
        down, across = self.random.choice(((1, 32), (32, 1), (32, 32)))
        x, stride = self.matrix(rows, cols, dtype)
        scales = self.bytes(-(-rows // down) * -(-cols // across))
        given = (x, dtype, rows, cols, stride, down, across)
        self.call("fp8_mx_quantize", *given, self.bytes(rows * cols), scales, self.threads())

    def fp8_nvfp4_train_mm(self) -> None:
        m, n, k, dtype = self.size(), self.size(), -(-self.random.choice(DEEP) // 16) * 16, self.dtype()
        sides = []
        for lines in (m, n):
            codes, stride = self.matrix(lines, k // 2, 0)
            sides.append((self.bytes(codes.size), stride, *self._block_scales(lines, k, 16)))
        bias = self.floats(n) if self.random.random() < 0.5 else None
        out, out_stride = self.matrix(m, n, dtype)
        given = (*sides[0], *sides[1], self.floats(1), self.floats(1), bias)
        self.call("fp8_nvfp4_train_mm", m, n, k, *given, out, dtype, out_stride, self.threads())

    def fp8_nvfp4_quantize(self) -> None:
        rows, k, dtype = self.size(), self.size(), self.dtype()
        transposed, tiles, rotated, both = (self.random.randrange(2) for _ in range(4))
        x, stride = self.matrix(*((k, rows) if transposed else (rows, k)), dtype)
        seed = self.numbers.integers(0, 2**62, 1) if self.random.random() < 0.5 else None
        blocks = -(-k // 16)
        made = self.bytes(rows * blocks * 8), self.bytes(-(-rows // (16 if tiles else 1)) * blocks)
        given = (x, dtype, rows, k, stride, transposed, float(self.random.choice((1.0, 500.0, 3e38))))
        self.call("fp8_nvfp4_quantize", *given, tiles, rotated, seed, 3, both, *made, self.threads())

    def fp8_scaled_grouped_mm(self) -> None:
        groups, along = self.random.choice((0, 1, 2, 3, 8)), self.random.randrange(2)
        m, n, k = self.size(), self.size(), self.size()
        tokens = (m, k)[along]
        ends = np.sort(self.numbers.integers(0, tokens + 1, groups)).astype(np.int64)
        left, left_stride, left_k = self.codes(m, k)
        by_row, by_col = self.random.random() < 0.5, self.random.random() < 0.5
        scale_left = self.floats(m if by_row else 1)
        stacked = groups if along == 0 else 1
        right = self.bytes(stacked * k * n)
        strides = (1, n) if self.random.random() < 0.5 else (k, 1)  # from column to column, from k to k
        scale_right = self.floats(stacked * n if by_col else 1)
        dtype = self.dtype()
        out = self.elements(m * n * (1 if along == 0 else groups), dtype)
        self.call(
            "fp8_scaled_grouped_mm",
            *(along, groups, ends, m, n, k, left, left_stride, left_k, self.random.randrange(2)),
            *(scale_left, int(by_row), right, k * n if along == 0 else 0, *strides, self.random.randrange(2)),
            *(scale_right, n if by_col and along == 0 else 0, int(by_col), out, dtype, 0 if along == 0 else m * n, n),
            self.threads(),
        )

    def fp8_weight_mm(self) -> None:
        m, k, n, dtype = self.size(), self.random.choice(DEEP), self.size(), self.dtype()
        x, stride = self.matrix(m, k, dtype)
        bias = self.floats(n) if self.random.random() < 0.5 else None
        given = (x, m, k, stride, dtype, self.bytes(n * k), self.floats(n), n, bias, self.elements(m * n, dtype))
        self.call("fp8_weight_mm", *given, self.threads())

    def nvfp4_matmul(self) -> None:
        m, k, n, dtype, bias_dtype = self.size(), self.random.choice(DEEP), self.size(), self.dtype(), self.dtype()
        padded = -(-k // 16) * 16
        x, stride = self.matrix(m, k, dtype)
        bias = self.elements(n, bias_dtype) if self.random.random() < 0.5 else None
        weight = (self.bytes(n * padded // 2), self.bytes(n * padded // 16), n, padded, 0.5)
        given = (x, m, k, stride, dtype, *weight, bias, bias_dtype, self.random.randrange(2))
        self.call("nvfp4_matmul", *given, self.elements(m * n, dtype), self.threads())

    def nvfp4_experts(self) -> None:
        self._experts("nvfp4_experts", packed=True)

    def fp8_experts(self) -> None:
        self._experts("fp8_experts", packed=False)

    def _experts(self, name: str, *, packed: bool) -> None:
        m, k, n, dtype, experts = self.size(), self.size(), self.size(), self.dtype(), self.random.choice((1, 2, 5))
        padded, grouped = -(-k // 16) * 16, self.random.random() < 0.5
        x, stride = self.matrix(m, k, dtype)
        which = self.numbers.integers(-experts, experts, m)
        if grouped:
            which = np.sort(self.numbers.integers(0, m + 1, experts))
        if len(which) and self.random.random() < 0.1:
            far = (-(2**40), -experts - 1, m + experts + 1, 2**40)
            which[self.random.randrange(len(which))] = self.random.choice(far)
        count = experts * n
        weight: tuple[Any, ...]
        if packed:
            packed_weight = self.bytes(count * padded // 2), self.bytes(count * padded // 16), self.floats(experts)
            weight = (*packed_weight, experts, n, padded)
        else:
            weight = (self.bytes(count * k), self.floats(count), experts, n)
        given = (x, m, k, stride, dtype, *weight, which.astype(np.int64), int(grouped))
        self.call(name, *given, self.elements(m * n, dtype), self.threads())

    def fp8_fingerprints(self) -> None:
        dtypes = np.array([self.dtype() for _ in range(self.random.randrange(5))], np.int32)
        numels = np.array([self.size() * self.size() for _ in dtypes], np.int64)
        arrays = [self.elements(int(numel), int(dtype)) for numel, dtype in zip(numels, dtypes)]
        pointers = np.array([one.ctypes.data for one in arrays], np.uint64)
        self.call("fp8_fingerprints", len(dtypes), pointers, numels, dtypes, np.empty(len(dtypes), np.int64))

    def fp8_cache_quantize(self) -> None:
        sizes, dtype, scales = self._cache(), self.dtype(), self.random.random() < 0.5
        x, strides = self._vectors(sizes, 0, lambda count: self.elements(count, dtype))
        rows = self.bytes(int(np.prod(sizes[:3])) * (sizes[3] + (0 if scales else 4)))
        by = self.floats(sizes[1]) if scales else None
        self.call("fp8_cache_quantize", *sizes, x, dtype, strides, by, rows, self.threads())

    def fp8_cache_dequantize(self) -> None:
        sizes, dtype, scales = self._cache(), self.dtype(), self.random.random() < 0.5
        rows, strides = self._vectors(sizes, 0 if scales else 4, self.bytes)
        x = self.elements(int(np.prod(sizes)), dtype)
        by = self.floats(sizes[1]) if scales else None
        self.call("fp8_cache_dequantize", *sizes, rows, strides, by, x, dtype, self.threads())

    def fp8_attention(self) -> None:
        batch, groups, length, width = self._cache()
        repeats, queries, dtype = self.random.choice((1, 2, 4)), self.random.choice((0, 1, 1, 2, 5, 16)), self.dtype()
        value_width = self.random.choice((width, self.size()))
        query, strides = self._vectors((batch, groups * repeats, queries, width), 0, lambda n: self.elements(n, dtype))
        sides: list[Any] = []
        for own in (width, value_width):
            scales = self.random.random() < 0.5
            rows = self._vectors((batch, groups, length, own), 0 if scales else 4, self.bytes)
            sides += [*rows, self.floats(groups) if scales else None]
        kind = self.random.randrange(5)
        shape = [size if self.random.random() < 0.6 else 1 for size in (batch, groups * repeats, queries, length)]
        count = int(np.prod(shape))
        mask = {0: None, 1: self.numbers.integers(0, 2, count, dtype=np.uint8)}.get(
            kind, self.elements(count, kind - 2)
        )
        steps = np.array([0 if one == 1 else int(np.prod(shape[at + 1 :])) for at, one in enumerate(shape)], np.int64)
        given = (batch, groups, repeats, queries, length, width, value_width, query, strides, dtype, *sides)
        out = self.elements(batch * groups * repeats * queries * value_width, dtype)
        causal = self.random.randrange(2)
        self.call("fp8_attention", *given, mask, kind, steps, 0.125, causal, out, self.threads())

    def _cache(self) -> tuple[int, int, int, int]:
        """Sizes of a cache: batch, groups of heads, length, width of a head."""
        length = self.random.choice((*SIZES, 511, 513, 1030))
        return self.random.choice((0, 1, 2)), self.random.choice((1, 2, 3)), length, self.random.choice(SIZES[:22])

    def _vectors(
        self, sizes: tuple[int, int, int, int], more: int, make: Callable[[int], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Vectors [batch, group, position] that are contiguous, in any order and with gaps, and their strides."""
        width = sizes[3] + more
        strides, step = np.zeros(3, np.int64), width + self.random.choice((0, 0, 3))
        for dim in self.random.sample(range(3), 3):
            strides[dim] = step
            step = step * sizes[dim] + self.random.choice((0, 0, 5))
        last = sum((size - 1) * int(stride) for size, stride in zip(sizes, strides))
        return make(last + width if all(sizes[:3]) else 0), strides

    def nvfp4_scale_paths(self) -> None:
        block, rows = self.random.choice((16, 32)), self.random.choice((0, 1, 2, 5))
        columns = block * self.random.choice((1, 2, 4, 5, 9))
        factor = np.triu(self.floats(columns * columns, special=False).reshape(columns, columns)) + 4 * np.eye(columns)
        kept_zero = self.numbers.integers(0, 2, rows * columns // block, dtype=np.uint8)
        given = (self.floats(rows * columns), kept_zero, factor.astype(np.float32), rows, columns, block)
        found = np.empty(rows * columns // block, np.float32)
        search = (self.random.choice((1, 3, 16, 40)), self.random.randrange(4), self.random.randrange(4))
        self.call("nvfp4_scale_paths", *given, *search, found, self.threads())

    def nvfp4_round_block(self) -> None:
        block, n = self.random.choice((16, 32)), self.size()
        within = np.triu(self.floats(block * block, special=False).reshape(block, block)) + 4 * np.eye(block)
        made = [np.empty(block * n, np.float32) for _ in range(2)]
        given = (self.floats(block * n), within.astype(np.float32), n, block)
        self.call("nvfp4_round_block", *given, *made, self.threads())

    def nvfp4_code_search(self) -> None:
        block, rows, count = self.random.choice((16, 32)), self.random.choice((0, 1, 3)), self.random.choice((1, 3, 4))
        columns = block * count
        levels = self.numbers.integers(0, 15, rows * columns, dtype=np.int8)
        hessian = self.floats(columns * columns, special=False)
        given = (levels, np.abs(self.floats(rows * count)), self.floats(rows * columns), hessian)
        steps = (self.random.choice((0, 1, 50)), self.random.choice((1, 4)))
        self.call("nvfp4_code_search", *given, rows, columns, block, *steps, self.threads())

    def one_too_far(self) -> None:
        """What is to be found, or the sanitizers sleep."""
        self.call("fp8_scales", self.floats(16), 0, 1, 17, 0, 0, *np.empty((2, 1), np.float32), 1)


ENTRY_POINTS = [name for name in vars(Fuzzer) if name.startswith(("fp8_", "nvfp4_"))]


def _extent(rows: int, cols: int, stride: int, k_stride: int) -> int:
    return (rows - 1) * stride + (cols - 1) * k_stride + 1 if rows and cols else 0


def _as_c(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data if value.size else None)  # as torch has it
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_void_p(None) if value is None else ctypes.c_int64(value)  # an int takes a register, too


def work(path: str, seconds: float, seed: int, only: str | None) -> None:
    """In the process with the sanitizers: call for so long, and print what was done."""
    fuzzer = Fuzzer(ctypes.CDLL(path), seed)
    fuzzer.fp8_probe()
    names = [only] if only else ENTRY_POINTS
    calls: list[Callable[[], None]] = [getattr(fuzzer, name) for name in names]
    end = time.monotonic() + seconds
    while True:
        for call in calls:
            call()
        if time.monotonic() >= end:
            break
    print(json.dumps({"calls": fuzzer.calls, "shapes": len(fuzzer.shapes)}))


def runtime() -> list[str] | None:
    """The sanitizers' libraries, or None where the compiler has none."""
    from fp8_compile.torch_internals.inductor import cpp_compiler

    compiler = cpp_compiler()
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, *SANITIZE, "-shared", "-fPIC", "-x", "c++", os.devnull, "-o", f"{folder}/empty.so"]
        if subprocess.run(command, capture_output=True).returncode:
            return None
    ask = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    found = [subprocess.run(one, capture_output=True, text=True).stdout.strip() for one in ask]
    return found if all(os.path.isabs(path) for path in found) else None


def compiled(isa: Any) -> pathlib.Path:
    """All kernels with the sanitizers in them, for an instruction set."""
    from fp8_compile.kernels.cpu import library, nvfp4_search
    from fp8_compile.kernels.cpu.compiler import compiled_objects, run_compiler, source_texts
    from fp8_compile.kernels.cpu.kept_files import kept
    from fp8_compile.torch_internals.inductor import cpp_compiler

    compiler, sources = cpp_compiler(), {**library.SOURCES, **nvfp4_search.SOURCES}

    def make(folder: pathlib.Path) -> pathlib.Path:
        objects = compiled_objects([compiler, *FLAGS, *isa.flags], sources, folder)
        run_compiler([[compiler, "-shared", "-fopenmp", *SANITIZE, *objects, "-o", str(folder / "all.so")]])
        return folder / "all.so"

    key = repr((source_texts(), FLAGS, sources, isa.flags, compiler))
    return kept(f"sanitized_{isa.name}", ".so", key, make)


def fuzz(isa: Any, seconds: float, seed: int, only: str | None = None) -> Report:
    """Call the kernels of an instruction set for so long."""
    libraries = runtime()
    assert libraries is not None, "the compiler has no sanitizers"
    options = "detect_leaks=0:halt_on_error=0:detect_stack_use_after_return=0"  # Python leaks at its end
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=0",
        "PYTHONMALLOC": "malloc",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--work", str(compiled(isa)), "--seconds", str(seconds), "--seed", str(seed)]
    command += ["--only", only] if only else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    said = [at for at, line in enumerate(lines) if any(one in line for one in FINDINGS)]
    found = [f"{lines[at].strip()}{_place(lines[at + 1 :])}" for at in said]
    if done.returncode:
        found.append(f"the process ended with {done.returncode}: {done.stderr[-2000:]}")
    made = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {"calls": {}, "shapes": 0}
    return Report(isa.name, made["calls"], made["shapes"], list(dict.fromkeys(found)))


def _place(lines: list[str]) -> str:
    """Where in our sources, if the lines after a finding say so."""
    return next((f" ({line.strip()})" for line in lines[:12] if "/kernels/cpu/" in line), "")


@functools.cache
def instruction_sets() -> dict[str, Any]:
    """Those that this machine can run."""
    from fp8_compile.kernels.cpu import isa

    usable = [one for one in isa.ISAS.values() if one.needs <= isa.cpu_features() and one.name != "amx"]
    return {one.name: isa.with_wanted(one) for one in usable}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", action="append", help="an instruction set of this machine's; all if not given")
    parser.add_argument("--only", help="one entry point")
    parser.add_argument("--work", metavar="LIBRARY", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.seconds, given.seed, given.only)
        return 0
    if runtime() is None:
        print("the compiler has no sanitizers: install libasan and libubsan, or set CXX to a compiler that has them")
        return 2
    names = given.isa or list(instruction_sets())
    reports = [fuzz(instruction_sets()[name], given.seconds / len(names), given.seed, given.only) for name in names]
    print(*reports, sep="\n")
    return int(any(report.findings for report in reports))


if __name__ == "__main__":
    sys.exit(main())
