"""``keep_first`` and ``keep_last``, for whole models and for blocks that are compiled by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, explain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def given() -> Tensor:
    return torch.randn(16, 32, requires_grad=True)


def kept(**options: Any) -> dict[str, str]:
    """Layer -> why it is not rewritten, in forward."""
    report = explain(Model(), (given(),), config=Config(**{"recipe": "tensorwise", **options}))
    return {row.module: row.reason for row in report.skipped if row.gemm == "output"}


def test_nvfp4_keeps_the_last_blocks_and_other_recipes_none() -> None:
    assert kept(recipe="nvfp4") == {"layers.7.up": "the last of 8 blocks"}
    assert kept(recipe="mxfp8") == kept(recipe="nvfp4", keep_last=0) == {}


def test_a_number_and_a_fraction_keep_blocks_of_every_recipe() -> None:
    reason = "one of the last 2 of 8 blocks"
    expected = {"layers.0.up": "the first of 8 blocks", "layers.6.up": reason, "layers.7.up": reason}
    assert kept(recipe="rowwise", keep_first=1, keep_last=0.25) == expected


def test_all_three_gemms_of_a_kept_block_stay() -> None:
    report = explain(Model(), (given(),), config=Config(recipe="mxfp8", keep_last=1))
    assert sorted(row.gemm for row in report.skipped) == ["grad_input", "grad_weight", "output"]


def test_include_that_names_the_block_wins_and_exclude_wins_over_it() -> None:
    reason = "one of the last 2 of 8 blocks"
    assert kept(keep_last=2, include=("*", "layers.7")) == {"layers.6.up": reason}
    assert kept(keep_last=2, include=("*", "layers.*")) == {"layers.6.up": reason, "layers.7.up": reason}
    assert kept(keep_last=2, exclude=("layers.7",)) == {"layers.6.up": reason, "layers.7.up": "excluded by 'layers.7'"}


@pytest.mark.parametrize("compile_each", [nn.Module.compile, None], ids=["in place", "wrapped"])
def test_blocks_compiled_one_by_one_are_looked_up_in_the_model(compile_each: Any, caplog: Any) -> None:
    backend, model = UncompiledBackend(Config(recipe="tensorwise", keep_last=2)), Model()
    for index, layer in enumerate(list(model.layers)):
        if compile_each:
            layer.compile(backend=backend)
        else:
            model.layers[index] = torch.compile(layer, backend=backend)  # type: ignore[assignment]
    model(given()).sum().backward()
    model(given()).sum().backward()
    rewritten, whole = backend.reports  # one code for the first six blocks, one for the last two
    assert len(rewritten.rewritten) == 3 and not rewritten.skipped
    assert {row.reason for row in whole.skipped} == {"one of the last 2 of 8 blocks"}
    assert "found no matmul" not in caplog.text


def test_a_block_called_before_the_model_has_the_place_that_it_has_in_it() -> None:
    backend, model = UncompiledBackend(Config(recipe="tensorwise", keep_last=1)), Model()
    for layer in model.layers:
        layer.compile(backend=backend)
    model.layers[7](given())
    model.layers[0](given())
    assert [len(report.rewritten) for report in backend.reports] == [0, 3]


def test_a_product_written_outside_of_its_block_is_kept_with_its_weight() -> None:
    class Outside(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = nn.functional.linear(x, layer.up.weight)  # type: ignore[union-attr,arg-type]
            return x

    report = explain(Outside(), (given(),), config=Config(recipe="tensorwise", keep_last=1))
    assert {row.weight for row in report.skipped} == {"layers.7.up.weight"}


def test_a_model_without_blocks_is_an_error_where_they_were_asked_for() -> None:
    with pytest.raises(Exception, match="keep_last=1: Block has no stack of equal blocks.*exclude="):
        torch.compile(Block(), backend=UncompiledBackend(Config(keep_last=1)))(given())
    with pytest.raises(Exception, match="keep_first=3 leaves none of the 2 blocks of Model to rewrite"):
        torch.compile(Model(2), backend=UncompiledBackend(Config(keep_first=3)))(given())


def test_a_default_that_finds_no_blocks_says_so_once(caplog: Any) -> None:
    class Alone(Block):
        pass

    for options in ({"keep_last": 0}, {}, {}):
        torch.compile(Alone(), backend=UncompiledBackend(Config(recipe="nvfp4", **options)))(given())
    assert caplog.text.count("Alone has no stack of equal blocks") == 1
