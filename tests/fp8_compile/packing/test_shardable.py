"""``shardable``: packed codes as parameters, one process and two ranks of FSDP2."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8_compile
from fp8_compile import PackedLinear, pack, shardable, update_packed
from fp8_compile.packing.formats import FORMATS

X = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))


def model(format: str = "nvfp4") -> nn.Module:
    """The second layer has 40 rows, no whole number of sixteens."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 40), nn.Linear(40, 48))
    pack(layers, format, method="rtn", progress=False)
    return layers


def run(layers: nn.Module) -> tuple[Tensor, Tensor]:
    x = X.clone().requires_grad_()
    y = layers(x)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("format", FORMATS)
def test_a_shardable_model_computes_the_same_and_its_states_fit_both_ways(format: str) -> None:
    plain, sharded = model(format), model(format)
    assert shardable(sharded) == ["0", "1", "2"] == shardable(sharded)
    assert all(torch.equal(one, other) for one, other in zip(run(plain), run(sharded)))
    assert all(a.dtype != torch.uint8 or not a.requires_grad for a in sharded.parameters())
    for taker, giver in ((sharded, plain), (plain, sharded), (sharded, copy.deepcopy(sharded))):
        state = {name: value.clone() for name, value in giver.state_dict().items()}
        update_packed(taker, {"0.weight": torch.randn(64, 96), "1.weight": torch.randn(40, 64)})
        assert not torch.equal(run(taker)[0], run(model(format))[0])
        taker.load_state_dict(state)
        assert torch.equal(run(taker)[0], run(model(format))[0])


def test_copies_pickles_moves_and_casts_keep_the_codes() -> None:
    sharded = model()
    shardable(sharded)
    expected, stored = run(sharded)[0], io.BytesIO()
    torch.save(copy.deepcopy(sharded), stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert torch.equal(run(loaded)[0], expected) and isinstance(loaded[0], PackedLinear)
    assert torch.equal(loaded.to(torch.bfloat16)[0].dequantize(), sharded[0].dequantize())


def test_tied_layers_share_one_parameter() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    layers[1].weight = layers[0].weight
    pack(layers, method="rtn", progress=False)
    shardable(layers)
    assert layers[0]._parameters["codes"] is layers[1]._parameters["codes"]


def test_a_model_that_is_not_packed_is_an_error() -> None:
    with pytest.raises(ValueError, match="shardable: Linear has no packed weights; expected a model after"):
        shardable(nn.Linear(4, 4))


@pytest.mark.parametrize("compiled", (0, 1), ids=("uncompiled", "compiled"))
def test_adapters_over_a_sharded_base_train_as_in_one_process(ranks: Any, compiled: int) -> None:
    first, second = ranks["packed_base"]
    for losses in (one["losses"][3 * compiled : 3 * compiled + 3] for one in (first, second)):
        assert losses[1] == losses[2], "the steps after the checkpoint, and again from it"
    both = zip(*(sum(one["losses"][3 * compiled : 3 * compiled + 2], []) for one in (first, second)))
    assert [sum(pair) / 2 for pair in both] == pytest.approx(first["alone"][compiled], rel=1e-6)  # sums in FP32
    found, expected = first["gradients"][compiled], first["gradients_alone"][compiled]
    assert found.keys() == expected.keys() and len(found) == 8
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-6, name


def test_each_rank_holds_half_of_the_codes_between_steps(ranks: Any) -> None:
    assert [one["bytes"] for one in ranks["packed_base"]] == [[2304, 4608]] * 2
    assert 4608 == 2 * (2 * 32 * 64) // 2 + 2 * (2 * 32 * 64) // 16


def test_new_weights_for_a_sharded_model_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = model()
    shardable(sharded)
    monkeypatch.setattr(type(sharded[0]), "is_sharded", True)
    with pytest.raises(ValueError, match="0.weight: its codes are sharded; expected new weights, or merge_adapters"):
        update_packed(sharded, {"0.weight": torch.randn(64, 96)})
    assert fp8_compile.shardable is shardable
