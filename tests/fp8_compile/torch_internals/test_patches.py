"""What is replaced in torch and Triton is replaced where it fits, and nothing but speed is lost where it does not."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from interpreted_step import LARGE_BLOCKS, compiled_for_gpu
from torch import Tensor, nn
from torch._inductor.codegen.triton import TritonKernel
from uncompiled import CODE_ANEW

import fp8_compile
import fp8_compile.kernels.inductor  # applies the rows
from fp8_compile import scaling_state
from fp8_compile.cli import machine
from fp8_compile.torch_internals import patches

ON_INDUCTOR = [name for name in patches.TABLE if name != "interpreter"]


class Gelu(nn.Module):
    """With biases, whose gradients are sums over rows. In FP32 and without a norm: nothing else rounds in another
    way when kernels are fused differently."""

    def __init__(self, inner: int = 64, outer: int = 96) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inner, outer), nn.Linear(outer, inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Change a row of the table for a test."""

    def change(name: str, **fields: Any) -> None:
        monkeypatch.setitem(patches.TABLE, name, dataclasses.replace(patches.TABLE[name], **fields))
        monkeypatch.setattr(patches, "_warned", set())
        patches._misfit.cache_clear()

    yield change
    patches._misfit.cache_clear()


@pytest.mark.parametrize("name", patches.TABLE)
def test_every_row_fits_the_torch_and_triton_that_are_installed(name: str) -> None:
    assert patches.why_not(name) is None
    assert patches.fits(name)


@pytest.mark.parametrize("name", ON_INDUCTOR)
def test_every_function_of_a_row_is_replaced(name: str) -> None:
    assert patches.active(name)
    for function in patches.TABLE[name].functions:
        owner, attribute = patches._place(function)
        replaced = getattr(owner, attribute)
        if replaced.__module__.startswith("torchao."):  # it has the same cure for one of them, before or after ours
            continue
        assert replaced.__module__.startswith("torch."), "as a reader of tracebacks expects"
        assert hasattr(replaced, "__wrapped__")


def test_another_release_leaves_a_row_out_with_one_warning(row: Any, caplog: pytest.LogCaptureFixture) -> None:
    row("tile_sum", releases=("1.13", "2.0"))
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        assert not patches.active("tile_sum") and not patches.active("tile_sum")
        assert patches.active("atomic_max")
    (record,) = caplog.records
    assert "tile_sum: written for torch 1.13, 2.0, found 2." in record.getMessage()
    assert patches.TABLE["tile_sum"].without in record.getMessage()


@pytest.mark.parametrize(
    "functions, reason",
    [
        (
            {"torch._inductor.codegen.triton.TritonKernel.store": ("(self, name, index, value)",)},
            r"TritonKernel\.store\(self, name, index, value\), found \(self, name, index, value, mode=None\)",
        ),
        ({"torch._inductor.codegen.triton.TritonKernel.no_such": ("()",)}, r"torch 2\.\S+ has no \S+\.no_such"),
        ({"torch._inductor.no_such_module.store": ("()",)}, r"torch 2\.\S+ has no \S+no_such_module\.store"),
        ({"no_such_package.function": ("()",)}, "no_such_package is not installed"),
    ],
)
def test_what_does_not_fit_is_named(row: Any, functions: dict[str, tuple[str, ...]], reason: str) -> None:
    row("atomic_max", functions=functions)
    found = patches.why_not("atomic_max")
    assert found is not None and re.search(reason, found)
    assert patches.left_out() == ("atomic_max",)


def test_a_row_that_is_left_out_calls_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def method(self, x: int) -> int:
            return x

    original = Owner.method
    calls = patches._replacement("tile_sum", original, lambda self, original, x: original(self, x) + 100)
    monkeypatch.setattr(Owner, "method", calls)
    assert Owner().method(1) == 101
    fixed = patches._replacement("tile_sum", lambda x: x, lambda original, x: original(x) + 100, no_self=True)
    assert fixed(1) == 101
    with patches.without("tile_sum"):
        assert Owner().method(1) == 1 and fixed(1) == 1
    assert Owner().method(1) == 101


def test_the_doctor_lists_every_row(row: Any) -> None:
    assert [(check.name, check.found) for check in machine.patched()] == [
        (f"patch {name}", "active") for name in patches.TABLE
    ]
    row("peak_estimate", releases=("1.13",))
    (check,) = (check for check in machine.patched() if check.status != "ok")
    assert check.name == "patch peak_estimate" and check.status == "note"
    assert check.found.startswith("left out: written for torch 1.13, found ")
    assert check.remedy == patches.TABLE["peak_estimate"].without


def test_every_row_says_what_it_is_for() -> None:
    for patch in patches.TABLE.values():
        assert all((patch.symptom, patch.link, patch.until, patch.without, patch.functions, patch.releases))


def trained(model: nn.Module, compiled: Any, rows: int = 70) -> dict[str, Tensor]:
    """Three steps: outputs, gradients and the scaling state."""
    torch.manual_seed(1)
    found = {}
    for step in range(3):
        x = torch.randn(rows, 64, requires_grad=True)
        y = compiled(x)
        y.backward(torch.randn_like(y))
        found |= {f"{step} output": y.detach(), f"{step} input": x.grad}
        found |= {f"{step} {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad()
    state = scaling_state(model).state_dict()
    return found | {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def on_absent_gpu(model: nn.Module) -> tuple[dict[str, Tensor], str]:
    """What the code for an H100 gives, and its source."""
    with compiled_for_gpu(LARGE_BLOCKS, 90) as graphs:
        options = {"recipe": "delayed", "target": "cuda:90", "loss_scale": 1024.0}
        found = trained(model, torch.compile(model, backend="fp8", options=options))
    return found, "".join(graph.source for graph in graphs)


@pytest.fixture(scope="module")
def with_all() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Gelu()
    found, source = on_absent_gpu(deepcopy(model))
    assert "tl.atomic_max(" in source
    return model, found


@pytest.mark.parametrize("name", ["atomic_max", "tile_sum"])
def test_code_for_a_gpu_gives_the_same_numbers_without(name: str, with_all: Any, caplog: Any) -> None:
    model, expected = with_all
    torch._dynamo.reset()
    with patches.without(name), caplog.at_level(logging.WARNING, "fp8_compile"):
        found, source = on_absent_gpu(deepcopy(model))
    assert len([record for record in caplog.records if f"({name}: " in record.getMessage()]) == 1
    assert ("tl.atomic_max(" in source) == (name != "atomic_max")
    assert found.keys() == expected.keys() and any("amax" in key or "history" in key for key in found)
    for key in expected:
        if "bias" in key:  # a sum of 70 rows in another order: each of them rounds by half a unit at most
            torch.testing.assert_close(found[key], expected[key], rtol=70 * 2**-24, atol=1e-5, msg=key)
        else:
            assert torch.equal(found[key], expected[key]), key


# What code for a CPU can meet: the other rows are about Triton's code.
ON_CPU = [("peak_estimate", "delayed"), ("peak_estimate", "blockwise"), ("loop_split", "delayed")]


def test_blockwise_is_skipped_on_a_cpu_where_inductors_loops_would_be_wrong() -> None:
    arguments = Gelu(), (torch.randn(32, 64),), None, fp8_compile.Config(recipe="blockwise")
    assert fp8_compile.explain(*arguments).rewritten
    with patches.without("loop_split"):
        report = fp8_compile.explain(*arguments)
    assert not report.rewritten and "blockwise" in report.skipped[0].reason


def on_cpu(recipe: str) -> dict[str, Tensor]:
    """What code for a CPU gives, written again by Inductor whatever a cache has of the graph."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Gelu()
    return trained(model, torch.compile(model, backend="fp8", options={"recipe": recipe, "inductor": CODE_ANEW}))


@pytest.fixture(scope="module")
def with_all_on_cpu() -> dict[str, dict[str, Tensor]]:
    return {recipe: on_cpu(recipe) for recipe in ("delayed", "blockwise")}


@pytest.mark.parametrize("name, recipe", ON_CPU)
def test_code_for_a_cpu_gives_the_same_numbers_without(name: str, recipe: str, with_all_on_cpu: Any) -> None:
    with patches.without(name):
        found, expected = on_cpu(recipe), with_all_on_cpu[recipe]
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def test_methods_of_triton_kernels_keep_their_names_and_signatures() -> None:
    assert TritonKernel.store.__qualname__ == "TritonKernel.store"
    assert patches._signature(TritonKernel.store) == "(self, name, index, value, mode=None)"
