"""Inductor's C++ loop splitting is left out where fused loops have different shapes or a split would leave a rest, and
nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import sympy
import torch
from against_eager import LEAST_DB, snr
from torch import nn
from torch.utils._sympy.functions import FloorDiv

from fp8_compile import Backend, Config
from fp8_compile.kernels.inductor import loop_split
from fp8_compile.torch_internals import patches


def node(*shape: int) -> SimpleNamespace:
    """A loop whose last index is divided by 128."""
    variables = [sympy.Symbol(f"i{dim}", integer=True) for dim in range(len(shape))]
    loop = SimpleNamespace(iter_vars=variables, indexing_exprs={"index0": FloorDiv(variables[-1], sympy.Integer(128))})
    body = ((list(shape), []), loop, None)
    return SimpleNamespace(node=SimpleNamespace(data=None, get_default_sizes_body=lambda: body))


def split(self: None, nodes: list[SimpleNamespace]) -> list[str]:
    """Stands for Inductor's own function."""
    return [f"split {len(nodes)}"]


def test_it_is_applied() -> None:
    assert patches.active("loop_split")


def test_loops_over_equal_shapes_are_split_by_inductor() -> None:
    assert loop_split.try_loop_split(None, split, [node(512, 1024), node(512, 1024)]) == ["split 2"]


def test_loops_over_different_shapes_stay_as_they_are() -> None:
    nodes = [node(512, 1024), node(1024, 512)]
    assert loop_split.try_loop_split(None, split, nodes) is nodes


def test_a_loop_that_is_not_a_multiple_of_its_divisor_stays_as_it_is() -> None:
    nodes = [node(24, 144)]
    assert loop_split.try_loop_split(None, split, nodes) is nodes


def test_blocks_that_do_not_fill_a_row_are_written_to_its_end() -> None:
    """The last 16 of 144 elements were left as they were in memory."""
    model = nn.Linear(144, 32)
    compiled = torch.compile(model, backend=Backend(Config(recipe="blockwise")), dynamic=False)
    x = torch.randn(24, 144, requires_grad=True)
    y = compiled(x)
    y.backward(torch.ones_like(y))
    assert snr(y, model(x)) > LEAST_DB
    assert snr(x.grad, model.weight.sum(0).expand(24, 144)) > LEAST_DB
