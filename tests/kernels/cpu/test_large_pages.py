"""Weights in large pages: the same numbers, in memory of their own that is returned."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch

from fp8_compile import pack
from fp8_compile.kernels.cpu import large_pages
from fp8_compile.kernels.cpu.large_pages import LINE, in_large_pages


@pytest.fixture(autouse=True)
def no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_region", None)


def test_copies_of_any_size_and_dtype_are_equal_and_have_storages_of_their_own() -> None:
    given = [torch.randint(0, 256, (rows, 2048), dtype=torch.uint8) for rows in (32, 33, 1000, 20000)]
    given += [torch.randn(300, 256).to(torch.float8_e4m3fn), torch.randn(2, 100, 96)]
    copies = [in_large_pages(one) for one in given]
    for one, other in zip(given, copies):
        assert other.dtype == one.dtype and torch.equal(other.view(torch.uint8), one.view(torch.uint8))
        assert other.data_ptr() % LINE == 0 and other.untyped_storage().nbytes() == one.nbytes
    starts = sorted((one.data_ptr(), one.nbytes) for one in copies)
    assert all(start + size <= after for (start, size), (after, _) in zip(starts, starts[1:])), "none overlap"
    saved = io.BytesIO()
    torch.save(copies[0], saved)
    assert saved.tell() < 2 * copies[0].nbytes, "without the region around it"
    assert torch.equal(copy.deepcopy(copies[1]), given[1])


def test_a_region_is_returned_when_none_of_its_weights_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (in_large_pages(torch.ones(1 << 17)) for _ in range(2))
    memory = weakref.ref(large_pages._region.memory)
    large_pages._region = None
    del first
    gc.collect()
    assert memory() is not None and bool((second == 1).all())
    del second
    gc.collect()
    assert memory() is None


def test_small_tensors_and_those_of_other_devices_stay_where_they_are() -> None:
    for one in (torch.ones(100), torch.empty(1 << 20, device="meta")):
        assert in_large_pages(one) is one


def test_a_system_without_large_pages_or_memory_keeps_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise OSError("no memory")

    one = torch.ones(1 << 17)
    monkeypatch.setattr(large_pages, "_Region", refuse)
    assert in_large_pages(one) is one
    monkeypatch.delattr(large_pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert in_large_pages(one) is one


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_packed_layers_are_there(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512))
    pack(model, format, method="rtn", progress=False)
    assert large_pages._region is not None
    x = torch.randn(3, 512)
    assert torch.equal(model(x), copy.deepcopy(model)(x))
    fresh = torch.nn.Sequential(torch.nn.Linear(512, 512))
    pack(fresh, format, method="rtn", progress=False)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), model(x))
