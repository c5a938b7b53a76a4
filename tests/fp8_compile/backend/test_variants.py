"""Blocks that patterns treat differently have code of their own, whatever is put around the model."""

from __future__ import annotations

from typing import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from module_of import ModuleOf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from uncompiled import UncompiledBackend

from fp8_compile import Config


class Block(nn.Module):
    """Compiled by itself after a graph break, as all blocks are: Dynamo has one code for them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.up(x)


def in_turn(self: ModuleOf, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x)
    return x


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel], ids=["plain", "data parallel"])
def test_a_block_after_an_excluded_one_is_not_run_with_its_code(
    wrap: Callable[[nn.Module], nn.Module], one_rank: None
) -> None:
    backend = UncompiledBackend(Config(recipe="tensorwise", exclude=("blocks.1*",)))
    model = ModuleOf(in_turn, blocks=nn.ModuleList(Block() for _ in range(3)))
    torch.compile(wrap(model), backend=backend)(torch.randn(16, 32))
    rewritten = {row.module for report in backend.reports for row in report.rewritten}
    skipped = {row.module for report in backend.reports for row in report.skipped}
    assert (rewritten, skipped) == ({"blocks.0.up", "blocks.2.up"}, {"blocks.1.up"})
