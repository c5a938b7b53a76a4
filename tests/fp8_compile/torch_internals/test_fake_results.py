"""A result on fake tensors that comes from memory is what computing it again would give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp8_compile.kernels.cpu.quantize  # noqa: F401  registers operations
from fp8_compile.torch_internals import fake_results
from fp8_compile.torch_internals.fake_results import run_fake
from fp8_compile.torch_internals.graphs import python_dispatcher

aten, ours = torch.ops.aten, torch.ops.fp8_compile


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    fake_results.forget()
    yield
    fake_results.forget()


def fake(mode: FakeTensorMode, *shape: int, dtype: torch.dtype = torch.float32) -> FakeTensor:
    return mode.from_tensor(torch.zeros(shape, dtype=dtype))


def facts(result: Any, tensors: list[FakeTensor]) -> Any:
    """What a graph is told by a value, and which arguments it shares memory with."""
    if isinstance(result, (tuple, list)):
        return type(result), [facts(one, tensors) for one in result]
    if not isinstance(result, torch.Tensor):
        return result
    storage = result.untyped_storage()
    shared = [storage._cdata == tensor.untyped_storage()._cdata for tensor in tensors]
    layout = (result.shape, result.stride(), result.storage_offset(), storage.nbytes())
    return type(result), *layout, result.dtype, result.device, result.requires_grad, result.fake_mode, shared


CASES: dict[str, tuple[Any, Callable[[FakeTensor], tuple[Any, ...]], dict[str, Any]]] = {
    "pointwise": (aten.mul.Tensor, lambda x: (x, x), {}),
    "number": (aten.mul.Tensor, lambda x: (x, 2.0), {}),
    "reduction": (aten.amax.default, lambda x: (x, [0, 1], True), {}),
    "keyword": (aten.sum.dim_IntList, lambda x: (x, [1], True), {"dtype": torch.float64}),
    "permute": (aten.permute.default, lambda x: (x, [1, 0]), {}),
    "pointwise of a permuted one": (aten.abs.default, lambda x: (x.t(),), {}),
    "select": (aten.select.int, lambda x: (x, 0, 3), {}),
    "view of a part": (aten.view.default, lambda x: (x[3], [4, 4]), {}),
    "bitcast": (aten.view.dtype, lambda x: (x, torch.uint8), {}),
    "bitcast of a part": (aten.view.dtype, lambda x: (x[3], torch.uint8), {}),
    "expand": (aten.expand.default, lambda x: (x[:1], [5, 16]), {}),
    "two results": (aten.max.dim, lambda x: (x, 1), {}),
    "a list of views": (aten.split.Tensor, lambda x: (x, 3), {}),
    "as_strided": (aten.as_strided.default, lambda x: (x[2:], [2, 2], [1, 1], 5), {}),
    "a list of tensors": (aten.cat.default, lambda x: ([x, x.t().contiguous().t()],), {}),
    "from nothing": (aten.full.default, lambda x: ([2, 3], 1.0), {"device": torch.device("cpu")}),
    "in place": (aten.add_.Tensor, lambda x: (x, 1), {}),
    "an operation of ours": (ours.cast.default, lambda x: (x, x[:1, :1], torch.float8_e4m3fn, [-1, -1]), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_result_from_memory_is_the_computed_one(case: str) -> None:
    op, arguments, kwargs = CASES[case]
    expected: Any = None
    for _ in range(3):  # each in a mode of its own, as each graph has one
        mode = FakeTensorMode()
        with mode:
            args = arguments(fake(mode, 8, 16))
        tensors = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
        tensors = [item for item in tensors if isinstance(item, torch.Tensor)]
        with mode, python_dispatcher():
            expected = facts(op(*args, **kwargs), tensors)
        for _ in range(2):
            assert facts(run_fake(mode, op, args, kwargs), tensors) == expected


def test_the_second_time_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode()
    x = fake(mode, 8, 16)
    first = run_fake(mode, aten.mul.Tensor, (x, x), {})
    monkeypatch.setattr(fake_results, "python_dispatcher", None)  # computing would fail
    second = run_fake(mode, aten.mul.Tensor, (x, x), {})
    assert first is not second and first.untyped_storage()._cdata != second.untyped_storage()._cdata
    with pytest.raises(TypeError):
        run_fake(mode, aten.mul.Tensor, (x, fake(mode, 1, 16)), {})


@pytest.mark.parametrize(
    "one, other",
    [
        (2, 2.0),  # int64 tensors become FP32 ones
        (1, True),
        (torch.float16, torch.bfloat16),
        ((), (1,)),
    ],
)
def test_arguments_that_are_not_the_same_have_results_of_their_own(one: Any, other: Any) -> None:
    mode = FakeTensorMode()
    x = fake(mode, 1, dtype=torch.bool)
    op = aten.mul.Tensor
    if isinstance(one, torch.dtype):
        op = torch.ops.prims.convert_element_type.default
    elif isinstance(one, tuple):
        op = aten.view.default
    for _ in range(2):
        for arg in (one, other):
            with mode, python_dispatcher():
                expected = op(x, arg)
            found = run_fake(mode, op, (x, arg), {})
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)


def test_sizes_that_are_symbols_are_computed_each_time() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    x = fake(mode, 8, 16)
    assert x._has_symbolic_sizes_strides
    results = [run_fake(mode, aten.mul.Tensor, (x, x), {}) for _ in range(2)]
    assert results[0].shape == x.shape and not fake_results._known


def test_memory_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_results, "MOST_ENTRIES", 5)
    mode = FakeTensorMode()
    for size in range(1, 20):
        x = fake(mode, size)
        assert run_fake(mode, aten.neg.default, (x,), {}).shape == (size,)
        assert len(fake_results._known) <= 5
