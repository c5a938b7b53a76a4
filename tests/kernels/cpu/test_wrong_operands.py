"""Every operation in C++ refuses what does not fit, by name, and never crashes. Without a compiler it says the same.

A table: for each operation a call that works, and from it calls that are wrong in one argument each. The calls of an
operation are made in a process of their own, so that a crash is the failure of its test and not the end of all.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import Tensor

from fp8_compile.kernels import (  # noqa: F401  define operations
    delayed_scaling,
    experts,
    fp8_cache,
    fp8_inputs,
    fp8_weight,
    mxfp8,
    nvfp4_training,
)
from fp8_compile.kernels.cpu import (  # noqa: F401
    nvfp4,
    quantize,
    quantize_mm,
    scaled_grouped_mm,
    scaled_mm,
    update_scales,  # noqa: F401
)
from fp8_compile.kernels.cpu.operations import registered
from fp8_compile.kernels.nvfp4 import ops  # noqa: F401

M, K, N, E = 5, 160, 24, 3
E4M3, E5M2, FP32, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.bfloat16


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(E4M3)


def nibbles(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


# Name -> a call that works: its arguments by name.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "scales": lambda: {"x": torch.ones(M, K), "dtype": E4M3, "block": [1, -1]},
    "whole_scale": lambda: {"x": torch.ones(M, K), "known": torch.ones(1, 1), "largest": 6.0},
    "quantize": lambda: {"x": torch.ones(M, K), "dtype": E4M3, "block": [1, -1]},
    "quantize_mm": lambda: {
        "x": torch.ones(M, K), "scale": torch.ones(()), "weight": fp8(N, K), "weight_scale": torch.ones(1, N),
        "bias": torch.ones(N), "e5m2": False, "rows": True,
    },
    "quantize_delayed_mm": lambda: {
        "x": torch.ones(M, K), "quant_scale": torch.ones(1, 1), "weight": fp8(N, K), "weight_scale": torch.ones(1, N),
        "bias": torch.ones(N), "e5m2": False,
    },
    "cast": lambda: {"x": torch.ones(M, K), "quant_scale": torch.ones(M, 1), "dtype": E4M3, "block": [1, -1]},
    "quantize_delayed": lambda: {
        "x": torch.ones(M, K), "quant_scale": torch.ones(1, 1), "dtype": E5M2, "wanted": True,
    },
    "scaled_mm": lambda: {
        "left": fp8(M, K), "right": fp8(K, N), "scale_left": torch.ones(M, 2), "scale_right": torch.ones(2, N),
        "bias": torch.ones(N), "out_dtype": BF16,
    },
    "scaled_grouped_mm": lambda: {
        "left": fp8(M, K), "right": fp8(E, K, N), "offsets": torch.tensor([1, 3, 4]), "scale_left": torch.ones(M, 1),
        "scale_right": torch.ones(E, 1, N), "out_dtype": FP32,
    },
    "quantize_inputs": lambda: {"x": torch.ones(M, K), "scale": torch.ones(())},
    "fp8_mm": lambda: {"x": torch.ones(M, K), "codes": fp8(N, K), "scales": torch.ones(N), "bias": torch.ones(N)},
    "nvfp4_mm": lambda: {
        "x": torch.ones(M, K), "codes": nibbles(N, K // 2), "block_scales": fp8(N, K // 16),
        "global_scale": torch.ones(()), "bias": torch.ones(N), "activations": None, "layout": "interleaved",
    },
    "nvfp4_experts_mm": lambda: {
        "x": torch.ones(M, K), "codes": nibbles(E, N, K // 2), "block_scales": fp8(E, N, K // 16),
        "global_scale": torch.ones(E), "which": torch.tensor([0, 2, 1, 0, 2]), "rows": "gathered",
        "layout": "interleaved",
    },
    "fp8_experts_mm": lambda: {
        "x": torch.ones(M, K), "codes": fp8(E, N, K), "scales": torch.ones(E, N), "which": torch.tensor([1, 2, 5]),
        "rows": "grouped",
    },
    "fp8_mm_grad": lambda: {"grad": torch.ones(M, N), "codes": fp8(N, K), "scales": torch.ones(N)},
    "nvfp4_mm_grad": lambda: {
        "grad": torch.ones(M, N), "codes": nibbles(N, K // 2), "block_scales": fp8(N, K // 16),
        "global_scale": torch.ones(()), "columns": K, "layout": "interleaved",
    },
    "nvfp4_experts_mm_grad": lambda: {
        "grad": torch.ones(M, N), "codes": nibbles(E, N, K // 2), "block_scales": fp8(E, N, K // 16),
        "global_scale": torch.ones(E), "which": torch.tensor([0, 2, 1, 0, 2]), "rows": "gathered", "columns": K,
        "layout": "interleaved",
    },
    "fp8_experts_mm_grad": lambda: {
        "grad": torch.ones(M, N), "codes": fp8(E, N, K), "scales": torch.ones(E, N), "which": torch.tensor([1, 2, 5]),
        "rows": "grouped",
    },
    "fp8_cache_quantize": lambda: {"x": torch.ones(2, E, M, 16), "scales": torch.ones(E)},
    "fp8_cache_dequantize": lambda: {"rows": nibbles(2, E, M, 16), "scales": torch.ones(E), "dtype": BF16},
    "fp8_attention": lambda: {
        "query": torch.ones(2, 2 * E, 1, 16), "keys": nibbles(2, E, M, 16), "values": nibbles(2, E, M, 16),
        "key_scales": torch.ones(E), "value_scales": torch.ones(E), "mask": torch.ones(1, 1, 1, M), "scale": 0.1,
        "is_causal": False,
    },
    "update_scales_": lambda: {
        "amaxes": torch.ones(7), "history": torch.ones(7, 4), "scales": torch.ones(2, 7),
        "counts": torch.zeros(10, 7, dtype=torch.int32), "room": torch.zeros(1, dtype=torch.int32),
        "known": torch.ones(2, 7), "largest": 448.0, "algorithm": "max", "interval": 1,
    },
    "mx_mm": lambda: {
        "left": fp8(M, K), "right": fp8(K, N), "scale_left": nibbles(M, K // 32), "scale_right": nibbles(K // 32, N),
        "bias": torch.ones(N), "out_dtype": BF16,
    },
    "quantize_mx": lambda: {"x": torch.ones(M, K), "block": [1, 32]},
    "nvfp4_train_mm": lambda: {
        "left": nibbles(M, K // 2), "right": nibbles(N, K // 2), "scale_left": fp8(M, K // 16),
        "scale_right": fp8(N, K // 16), "dequant_left": torch.ones(1, 1), "dequant_right": torch.ones(1, 1),
        "bias": torch.ones(N), "out_dtype": BF16,
    },
    "quantize_nvfp4": lambda: {
        "x": torch.ones(M, K), "enc": torch.ones(1, 1), "block": [1, 16], "transpose": False, "rotated": True,
        "seed": torch.tensor([1]), "stream": 0, "four_over_six": False,
    },
    **{
        op: lambda: {"amaxes": torch.ones(7), "recorded": [torch.ones(()), torch.ones(1, 1)], "rows": [3, 0]}
        for op in ("record_amaxes_", "accumulate_amaxes_")
    },
}  # fmt: skip
# What else is wrong in an operation: argument, what is wrong, its value.
MORE: dict[str, list[tuple[str, str, Any]]] = {
    "scales": [
        ("dtype", "no FP8", FP32),
        *(("block", str(block), block) for block in ([0, -1], [-2, -1], [1, 128], [0, 0], [7, -1])),
    ],
    "cast": [
        *(("block", str(block), block) for block in ([0, 0], [-1, -2], [128, 128])),
        ("quant_scale", "of columns", torch.ones(1, K)),
        ("dtype", "another chip's", torch.float8_e4m3fnuz),
    ],
    "quantize_delayed": [("dtype", "no FP8", BF16)],
    "quantize_delayed_mm": [
        ("weight", "in high precision, with a scale", torch.ones(N, K)),
        ("weight_scale", "none, of FP8", None),
    ],
    "quantize_mm": [
        ("weight", "in high precision, with a scale", torch.ones(N, K)),
        ("weight_scale", "none, of FP8", None),
        ("e5m2", "not that of a known scale", True),
    ],
    "scaled_mm": [
        ("scale_left", "of other tiles", torch.ones(M, 3)),
        ("scale_left", "of none", torch.ones(M, 0)),
        ("scale_right", "transposed", torch.ones(N, 2)),
        ("scale_right", "of fewer columns", torch.ones(2, N - 1)),
        ("out_dtype", "no float", torch.int8),
    ],
    "scaled_grouped_mm": [
        *(("offsets", str(ends), torch.tensor(ends)) for ends in ([1, 3, 6], [3, 1, 4], [-1, 2, 3], [1, 3, 2**40])),
        ("scale_right", "of too few groups", torch.ones(E - 1, 1, N)),
        ("out_dtype", "no float", torch.int8),
    ],
    "mx_mm": [
        ("scale_left", "of fewer rows", nibbles(M - 1, K // 32)),
        ("scale_right", "of other blocks", nibbles(K // 16, N)),
        ("out_dtype", "no float", torch.int8),
    ],
    "quantize_mx": [("block", str(block), block) for block in ([1, 16], [0, 32], [-1, -1])],
    "quantize_nvfp4": [
        *(("block", str(block), block) for block in ([16, 1], [1, 32], [-1, 16])),
        ("seed", "two", torch.tensor([1, 2])),
    ],
    "nvfp4_train_mm": [
        ("left", "half a block", nibbles(M, K // 2 + 4)),
        ("scale_right", "of fewer rows", fp8(N - 1, K // 16)),
        ("out_dtype", "no float", torch.int8),
    ],
    "nvfp4_mm": [
        ("codes", "not interleaved: strides", nibbles(K // 2, N).t()),
        ("codes", "half a block", nibbles(N, K // 2 + 4)),
        ("block_scales", "strides", fp8(K // 16, N).t()),
        ("bias", "strides", torch.ones(2 * N)[::2]),
        ("layout", "unknown", "upside down"),
        ("activations", "unknown", "int4"),
    ],
    "nvfp4_experts_mm": [
        *(("which", str(w), torch.tensor(w)) for w in ([0, 1, 2, 3, 0], [0, 0, 0, 0, -4], [2**40, 0, 0, 0, 0])),
        ("rows", "unknown", "sorted"),
        ("layout", "unknown", "upside down"),
    ],
    "fp8_experts_mm": [
        *(("which", str(w), torch.tensor(w)) for w in ([1, 2, 6], [3, 1, 5], [-1, 2, 3], [2**40, 2**41, 2**42])),
        ("rows", "unknown", "sorted"),
    ],
    "nvfp4_mm_grad": [
        ("codes", "strides", nibbles(K // 2, N).t()),
        ("columns", "too many", K + 1),
        ("columns", "too few", K - 16),
        ("layout", "unknown", "upside down"),
    ],
    "nvfp4_experts_mm_grad": [
        *(("which", str(w), torch.tensor(w)) for w in ([0, 1, 2, 3, 0], [0, 0, 0, 0, -4], [2**40, 0, 0, 0, 0])),
        ("columns", "too many", K + 1),
        ("rows", "unknown", "sorted"),
        ("layout", "unknown", "upside down"),
    ],
    "fp8_experts_mm_grad": [
        *(("which", str(w), torch.tensor(w)) for w in ([1, 2, 6], [3, 1, 5], [-1, 2, 3], [2**40, 2**41, 2**42])),
        ("rows", "unknown", "sorted"),
    ],
    "update_scales_": [
        ("history", "of fewer slots", torch.ones(6, 4)),
        ("history", "empty rings", torch.ones(7, 0)),
        ("history", "strides", torch.ones(4, 7).t()),
        ("amaxes", "strides", torch.ones(14)[::2]),
        ("scales", "strides", torch.ones(7, 2).t()),
        ("counts", "strides", torch.zeros(7, 10, dtype=torch.int32).t()),
        ("counts", "an older version's", torch.zeros(7, 7, dtype=torch.int32)),
        ("known", "strides", torch.ones(7, 2).t()),
        ("interval", "0", 0),
        ("interval", "-1", -1),
        ("algorithm", "unknown", "least"),
        ("largest", "of no format", 100.0),
    ],
    **{
        op: [
            ("amaxes", "strides", torch.ones(14)[::2]),
            ("recorded", "dtype", [torch.ones(()), torch.ones((), dtype=BF16)]),
            ("recorded", "shape", [torch.ones(2), torch.ones(())]),
            ("recorded", "fewer", [torch.ones(())]),
            ("rows", "too far", [0, 7]),
            ("rows", "negative", [-1, 0]),
            ("rows", "fewer", [0]),
        ]
        for op in ("record_amaxes_", "accumulate_amaxes_")
    },
}
# What is not wrong, though it is different.
ALLOWED = {
    *((op, "x", "device") for op in ("scales", "quantize", "quantize_mx")),  # the only tensor
    *((op, "x", what) for op in ("quantize_mx", "quantize_nvfp4") for what in ("shorter", "longer", "nothing")),
    *((op, "x", what) for op in ("scales", "quantize", "cast") for what in ("shorter", "longer", "nothing")),
    *(("quantize_inputs", "x", what) for what in ("shorter", "longer", "nothing")),
    *(("update_scales_", "history", what) for what in ("shorter", "longer")),
    *((op, "x", "shorter") for op in ("nvfp4_mm", "nvfp4_experts_mm")),  # K of the weight is a multiple of 16
    *(("fp8_mm_grad", "codes", what) for what in ("shorter", "longer", "nothing")),
    *(("fp8_experts_mm_grad", "codes", what) for what in ("shorter", "longer", "nothing")),
    *((op, "x", f"{what} dimensions") for op in ("quantize_delayed", "whole_scale") for what in ("more", "fewer")),
    *((op, "x", what) for op in ("quantize_delayed", "whole_scale") for what in ("shorter", "longer", "nothing")),
    ("whole_scale", "known", "fewer dimensions"),
    *((op, "quant_scale", "fewer dimensions") for op in ("quantize_delayed", "quantize_delayed_mm")),
    ("scaled_mm", "scale_left", "shorter"),  # one scale per row
    *((op, "amaxes", what) for op in ("record_amaxes_", "accumulate_amaxes_") for what in ("shorter", "longer")),
    *(("fp8_cache_quantize", "x", what) for what in ("shorter", "longer", "nothing")),
    *(("fp8_cache_dequantize", "rows", what) for what in ("shorter", "longer", "nothing")),
    *(("fp8_attention", "values", what) for what in ("shorter", "longer", "nothing")),
    ("fp8_attention", "mask", "dtype"),  # bool
    *((op, "amaxes", "device") for op in ("record_amaxes_", "accumulate_amaxes_")),  # the only tensor but for a list
}


def wrong_tensors(right: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are wrong in one way each."""
    yield "dtype", torch.zeros(right.shape, dtype=torch.bool)
    yield "complex", torch.zeros(right.shape, dtype=torch.complex64)
    yield "device", right.to("meta")
    yield "more dimensions", torch.zeros((2, 2, *right.shape), dtype=right.dtype)
    if right.dim():
        yield "fewer dimensions", torch.zeros((2,) if right.numel() > 1 and right.dim() > 1 else (), dtype=right.dtype)
    if right.numel() > 1:
        yield "shorter", right[..., :-1].contiguous()
        yield "longer", torch.zeros((*right.shape[:-1], right.shape[-1] + 33), dtype=right.dtype)
        yield "nothing", right[..., :0].contiguous()


def wrong_calls(op: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(argument, what is wrong with it, all arguments)"""
    for name, value in CALLS[op]().items():
        if isinstance(value, Tensor):
            for what, wrong in wrong_tensors(value):
                if (op, name, what) not in ALLOWED:
                    yield name, what, {**CALLS[op](), name: wrong}
    for name, what, wrong in MORE.get(op, []):
        yield name, what, {**CALLS[op](), name: wrong}


def refusal(op: str, given: dict[str, Any]) -> str | None:
    """What the operation says; None if it takes the arguments."""
    try:
        getattr(torch.ops.fp8_compile, op)(*given.values())
    except RuntimeError as error:
        return str(error)
    except BaseException as error:
        return f"a {type(error).__name__}: {error}"
    return None


def problem_of(op: str, given: dict[str, Any]) -> str | None:
    """What is wrong with how the operation refuses this; None if nothing is."""
    message = refusal(op, given)
    if message is None:
        return "is not refused"
    for part in (f"fp8_compile::{op}:", "xpected", "got"):
        if part not in message:
            return f"does not say {part!r}: {message}"
    # The size of one tensor is held against another's, which may be the one that is named.
    if not any(re.search(rf"\b{other}\b", message) for other in given):
        return f"names no argument: {message}"
    on_meta = any(isinstance(one, Tensor) and one.is_meta for one in given.values())  # refused before it is chosen
    without = message if on_meta else refusal(f"{op}_formula", given)
    return None if without == message else f"without a compiler says {without!r} instead of {message!r}"


def in_a_process(run: Callable[[], list[str]]) -> list[str]:
    """What it returns; a crash is one more line. Forked: importing torch takes seconds."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading) as pipe:
            lines = pipe.read().splitlines()
        status = os.waitpid(child, 0)[1]
        crashed = [f"it died of {signal.Signals(os.WTERMSIG(status)).name}"] if os.WIFSIGNALED(status) else []
        return [*lines, *crashed]
    try:
        signal.alarm(60)
        torch.set_num_threads(1)  # the parent's threads are not here
        with os.fdopen(writing, "w", buffering=1) as pipe:
            for line in run():
                pipe.write(line.replace("\n", " ") + "\n")
    finally:
        os._exit(0)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    if not registered():
        pytest.skip("there is no C++ without a compiler")


@pytest.mark.parametrize("op", CALLS)
def test_an_operation_takes_what_is_right_and_refuses_what_is_wrong_by_name(op: str) -> None:
    def run() -> Iterator[str]:
        getattr(torch.ops.fp8_compile, op)(*CALLS[op]().values())
        for name, what, given in wrong_calls(op):
            yield f"{name}, {what}: not answered"  # the last line, if it crashes
            yield f"{name}, {what}: {problem_of(op, given) or 'ok'}"
        yield "end"

    lines = in_a_process(run)  # type: ignore[arg-type]
    answers = [line for line in lines if not line.endswith((": not answered", ": ok"))]
    assert answers == ["end"], "\n".join([*answers, *lines[-2:]])


def test_every_operation_that_runs_c_is_in_the_table() -> None:
    """Those that have a kernel for the CPU alone, which is there once one of them was called. The products that do not
    run C++ themselves check their operands in Python."""
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fp8_compile::")}
    for_cpu = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"fp8_compile::{name}", "CPU")}
    in_python = ("cublaslt", "rowwise", "mx_grouped", "swizzled")
    products = {name for name in names if name.endswith("_mm") and not name.startswith(in_python)}
    assert for_cpu | products | {"quantize_inputs"} == set(CALLS)


def test_block_scales_of_any_k_give_the_products_and_of_none_zeros() -> None:
    def one(m: int, k: int, bias: float | None) -> bool:
        n, blocks = 9, -(-k // 128)
        left, right = torch.randn(m, k).to(E4M3), torch.randn(k, n).to(E5M2)
        scales = torch.rand(m, blocks), torch.rand(blocks, n)
        added = None if bias is None else torch.full((n,), bias)
        found = torch.ops.fp8_compile.scaled_mm(left, right, *scales, added, FP32)
        wide_left = left.double() * scales[0].repeat_interleave(128, 1)[:, :k].double()
        wide_right = right.double() * scales[1].repeat_interleave(128, 0)[:k].double()
        exact = wide_left @ wide_right + (bias or 0.0)
        # FP32 sums of 129 products at the most, each below 2 * 5**2.
        return torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-4)

    def run() -> list[str]:
        cases = [(m, k, bias) for m in (0, 1, 5, 130) for k in (0, 1, 128, 129) for bias in (None, 2.0)]
        return [f"M, K, bias {case}" for case in cases if not one(*case)]

    assert in_a_process(run) == []
