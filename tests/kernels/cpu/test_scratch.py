"""Memory for panels: one piece a thread, whatever is multiplied; products that nest or run side by side share none."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from fp8_compile.kernels.cpu import library
from fp8_compile.kernels.cpu.compiler import FOLDER

NESTED = """
#include <cstdio>
#include <thread>
#include "scratch.h"
using fp8::Scratch;
int main() {
  char *first, *other = nullptr;
  { const Scratch one(1 << 20); first = one.memory(); }
  {
    const Scratch outer(1000), inner(1000);
    std::thread thread([&] { const Scratch beside(1000); other = beside.memory(); });
    thread.join();
    std::printf("kept %d nested %d threads %d aligned %d\\n", outer.memory() == first, inner.memory() == first,
                other == first || other == inner.memory(), int(size_t(inner.memory()) % 64));
  }
  const Scratch again(1 << 20);
  std::printf("the larger one is kept %d\\n", again.memory() == first);
}
"""

# mallinfo2 counts what is in use: blocks of this size are mapped, or lie in the main thread's arena.
GROWTH = """
import ctypes, torch
from fp8_compile import quantize_nvfp4
from fp8_compile.kernels import fp8_weight as plain
from fp8_compile.kernels.cpu import nvfp4, operations, scaled_mm
from fp8_compile.kernels.formats import E4M3

class Info(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
used = lambda: (lambda info: info.hblkhd + info.uordblks)(libc.mallinfo2())
torch.set_num_threads(1)
x = torch.randn(512, 1024)
codes, scales = plain.quantize(torch.randn(512, 1024))
weight = quantize_nvfp4(torch.randn(512, 1024), method="rtn")
packed = (*nvfp4.interleave(weight.codes, weight.block_scales), weight.global_scale)
q, one = x.to(E4M3.dtype), torch.ones(1, 1)
products = {
    "fp8 by fp8": lambda: scaled_mm.scaled_mm_op(q, codes.t(), one, one, None, torch.float32),
    "fp8 weight": lambda: plain.mm_op(x, codes, scales, None),
    "fp8 weight, bf16": lambda: plain.mm_op(x.bfloat16(), codes, scales, None),
    "nvfp4 prefill": lambda: nvfp4.matmul(x, *packed),
    "a row": lambda: plain.mm_op(x[:1], codes, scales, None),
}
operations.registered()
before = start = used()
for name, product in products.items():
    product()
    print(name, used() - before)
    before = used()
print("all", used() - start)
"""


def test_a_nested_product_and_another_thread_get_memory_of_their_own(tmp_path: pathlib.Path) -> None:
    (tmp_path / "nested.cpp").write_text(NESTED)
    program, compiler = tmp_path / "nested", library.cpp_compiler()
    flags = ["-std=c++17", "-pthread", "-I", str(FOLDER)]
    library.run_compiler([[compiler, *flags, str(tmp_path / "nested.cpp"), "-o", str(program)]])
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == ["kept 1 nested 0 threads 0 aligned 0", "the larger one is kept 1"]


def test_all_products_of_a_thread_keep_one_piece_between_them() -> None:
    printed = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, env={**os.environ})
    assert printed.returncode == 0, printed.stderr
    growth = {name: int(number) for name, _, number in (line.rpartition(" ") for line in printed.stdout.splitlines())}
    panels = 2 * 512 * 1024 * 4  # both operands in FP32, the widest that panels are
    assert 0 < growth["all"] < 1.5 * panels, growth
