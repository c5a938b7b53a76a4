"""Which modules are stacks of equal blocks, and how many of them a number or a fraction keeps."""

from __future__ import annotations

import pytest
from torch import nn

from fp8_compile.block_stacks import explicit_patterns, is_kept, kept_blocks, number_of, stacks_of


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(experts))


class Other(Block):
    pass


def named(model: nn.Module) -> dict[str, list[str]]:
    return {stack.name: list(stack.blocks) for stack in stacks_of(model)}


@pytest.mark.parametrize("container", ["list", "sequential", "dict"])
def test_equal_blocks_in_a_container_are_a_stack(container: str) -> None:
    blocks = {str(index): Block() for index in range(3)}
    kinds = {"list": nn.ModuleList(blocks.values()), "sequential": nn.Sequential(*blocks.values())}
    model = nn.Module()
    model.layers = kinds.get(container) or nn.ModuleDict(blocks)
    assert named(model) == {"layers": ["layers.0", "layers.1", "layers.2"]}


def test_what_stands_before_and_after_blocks_is_not_one_of_them() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), Block(), Block(), nn.LayerNorm(4), nn.Linear(4, 4))
    assert named(model) == {"": ["1", "2"]}


def test_two_kinds_of_blocks_that_alternate_are_one_stack() -> None:
    assert named(nn.ModuleList([Block(), Other(), Block(), Other()])) == {"": ["0", "1", "2", "3"]}


def test_experts_in_a_block_are_not_a_stack() -> None:
    assert named(nn.ModuleDict({"layers": nn.ModuleList(Block(experts=8) for _ in range(2))})) == {
        "layers": ["layers.0", "layers.1"]
    }


def test_an_encoder_and_a_decoder_are_two_stacks_each_with_its_own_last_blocks() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList(Block() for _ in range(4))})
    model["decoder"] = nn.ModuleList(Other() for _ in range(12))
    assert kept_blocks(model, 0, 0.15) == {
        "encoder.3": "the last of 4 blocks in encoder",
        "decoder.10": "one of the last 2 of 12 blocks in decoder",
        "decoder.11": "one of the last 2 of 12 blocks in decoder",
    }


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
        nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Dropout()) for _ in range(3)),
        nn.ModuleList([Block(), Other()]),
    ],
    ids=["a layer", "an MLP", "a list of layers", "no matrices", "blocks of different classes"],
)
def test_other_lists_are_no_stacks(model: nn.Module) -> None:
    assert named(model) == {}


def test_a_block_that_is_several_times_in_a_list_counts_once() -> None:
    shared, other = Block(), Block()
    assert named(nn.ModuleList([shared, shared, other])) == {"": ["0", "2"]}


@pytest.mark.parametrize(
    "share, counts",
    [(0.15, {3: 0, 4: 1, 8: 1, 9: 1, 10: 2, 12: 2, 16: 2, 17: 3, 100: 15}), (2, {1: 1, 12: 2}), (0, {8: 0})],
)
def test_a_fraction_is_rounded_to_the_nearest_number(share: float, counts: dict[int, int]) -> None:
    assert {blocks: number_of(share, blocks) for blocks in counts} == counts


def test_first_and_last_blocks_say_which_they_are() -> None:
    found = kept_blocks(nn.ModuleList(Block() for _ in range(12)), 1, 2)
    assert found == {
        "0": "the first of 12 blocks",
        "10": "one of the last 2 of 12 blocks",
        "11": "one of the last 2 of 12 blocks",
    }
    assert all(map(is_kept, found.values())) and not is_kept("excluded by 'the last of 8 blocks'")


@pytest.mark.parametrize(
    "pattern, asks", [("layers.3", True), ("layers.*", False), ("*.up", False), ("layers.[23].up", True)]
)
def test_a_pattern_that_names_some_blocks_and_not_others_asks_for_them(pattern: str, asks: bool) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(4))})
    assert explicit_patterns(model, ("*", pattern)) == ((pattern,) if asks else ())
