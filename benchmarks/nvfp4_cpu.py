"""NVFP4 weights on the CPU: products straight from packed weights, against torch's own, in one run.

    python benchmarks/nvfp4_cpu.py [--rows 1 4 16 128 512] [--rounds 9] [--no-decode] [--ggml FOLDER] [--json]

Contenders take turns, round by round; figures are medians, in milliseconds a product. "memory": each product reads
another copy of its weight, so many that no cache holds them, as when a model's layers follow each other. "cache": the
same weight again and again. `int8, 4 KB` is the int8 product with the weight in ordinary pages of memory instead of
pages of 2 MB, where packed layers have it. `read` sums a buffer as large as the packed weight, in ordinary pages, under
the same conditions; `of read` compares products with that. Then tokens a second of a GPT that decodes one sequence.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from typing import Any, Callable

import ggml_peer
import nvfp4_decode
import torch
from torch.nn import functional as F

from fp8_compile.kernels.cpu import nvfp4
from fp8_compile.kernels.cpu.large_pages import in_large_pages

SHAPES = ((4096, 14336), (8192, 4096))  # N, K
BEYOND_CACHES = 256 << 20  # bytes
FEW = 16  # rows up to which reading the weight takes most of the time
INT4_GROUP = 128


class Contender:
    """One way to multiply: by copies of the weight in turn, or by the one weight as often, after a first time."""

    def __init__(
        self,
        name: str,
        weight: tuple[torch.Tensor, ...],
        product: Callable[..., Any],
        cold: bool,
        place: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        self.name, self.product, self.cold, self.times = name, product, cold, []
        copies = max(2, -(-BEYOND_CACHES // sum(part.nbytes for part in weight)))
        weight = tuple(map(place, weight))
        self.weights = [weight, *(tuple(map(place, weight)) if cold else weight for _ in range(copies - 1))]

    def round(self) -> None:
        if not self.cold:
            self.product(*self.weights[0])
        start = time.perf_counter()
        for weight in self.weights:
            self.product(*weight)
        self.times.append((time.perf_counter() - start) / len(self.weights))


class GgmlContender:
    def __init__(self, name: str, run: Callable[[], float]) -> None:
        self.name, self.run, self.times = name, run, []

    def round(self) -> None:
        self.run()
        self.times.append(self.run())


def int4_weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (n, k), dtype=torch.int32), 1)
    return packed, torch.rand(k // INT4_GROUP, n, 2).bfloat16()


def contenders(n: int, k: int, m: int, cold: bool, ggml: ggml_peer.Ggml | None) -> list[Contender | GgmlContender]:
    x = torch.randn(m, k)
    half = x.bfloat16()
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0x20, 0x70, (n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = nvfp4.interleave(codes, scales)
    dense = torch.randn(n, k)
    int8 = functools.partial(nvfp4.matmul, activations="int8")
    made: list[Contender | GgmlContender] = [
        Contender("nvfp4 int8", packed, lambda c, s: int8(half, c, s, 1e-3), cold, in_large_pages),
        Contender("nvfp4 bf16", packed, lambda c, s: nvfp4.matmul(half, c, s, 1e-3), cold, in_large_pages),
        Contender("nvfp4 fp32", packed, lambda c, s: nvfp4.matmul(x, c, s, 1e-3), cold, in_large_pages),
        Contender("int8, 4 KB", packed, lambda c, s: int8(half, c, s, 1e-3), cold),
        Contender("torch bf16", (dense.bfloat16(),), lambda w: F.linear(half, w), cold),
        Contender("torch fp32", (dense,), lambda w: F.linear(x, w), cold),
    ]
    if m <= FEW:
        int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
        made.append(Contender("torch int4", int4_weight(n, k), lambda w, s: int4(half, w, INT4_GROUP, s), cold))
        read = torch.ones(n * k * 9 // 16 // 8, dtype=torch.int64)
        made.append(Contender("read", (read,), torch.sum, cold))
        if ggml is not None:
            for type_name in ggml_peer.NUMBERS:
                if ggml.has(type_name):
                    copies = BEYOND_CACHES // (n * k // 2) if cold else 1
                    run = ggml.product(type_name, n, k, m, copies, torch.get_num_threads())
                    made.append(GgmlContender(f"ggml {type_name}", run))
    return made


def measure(n: int, k: int, m: int, cold: bool, rounds: int, ggml: ggml_peer.Ggml | None) -> dict[str, Any]:
    variants = contenders(n, k, m, cold, ggml)
    for _ in range((rounds if m <= FEW else 3) + 1):  # the first one warms up
        for variant in variants:
            variant.round()
    found = {variant.name: 1e3 * statistics.median(variant.times[1:]) for variant in variants}
    return {"n": n, "k": k, "m": m, "weights": "memory" if cold else "cache", "ms": found}


def show(row: dict[str, Any]) -> None:
    ms = row["ms"]
    print(f"\n{row['n']} x {row['k']}, M = {row['m']}, weights from {row['weights']}")
    peers = [name for name in ("torch bf16", "torch fp32", "torch int4") if name in ms]
    print(
        f"  {'':14}{'ms':>9}" + "".join(f"{'x ' + peer:>14}" for peer in peers) + ("   of read" if "read" in ms else "")
    )
    for name, took in ms.items():
        line = f"  {name:14}{took:9.3f}" + "".join(f"{ms[peer] / took:14.2f}" for peer in peers)
        print(line + (f"{ms['read'] / took:10.0%}" if "read" in ms and name.startswith("nvfp4") else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 128, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-decode", dest="decode", action="store_false")
    parser.add_argument("--tokens", type=int, default=64, help="decoded a variant and round")
    parser.add_argument("--ggml", default=None, help="folder with libggml-base.so and libggml-cpu.so")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    ggml = ggml_peer.find(arguments.ggml)
    rows = []
    for n, k in SHAPES:
        for m in arguments.rows:
            for cold in (True, False) if m == 1 else (True,) if m <= FEW else (False,):
                rows.append(measure(n, k, m, cold, arguments.rounds, ggml))
                if not arguments.json:
                    show(rows[-1])
    decoded = nvfp4_decode.measure(arguments.tokens) if arguments.decode else {}
    if arguments.json:
        print(json.dumps({"products": rows, "tokens_per_second": decoded}, indent=2))
    elif decoded:
        nvfp4_decode.show(decoded)


if __name__ == "__main__":
    main()
