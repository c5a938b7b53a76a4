"""update_packed: the same bytes as packing again, in the same tensors, without new graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp8_compile
from fp8_compile.packing.packed_linear import PackedLinear


class Block(nn.Module):
    """Layers that servers fuse, one with a bias, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 48, bias=False) for _ in range(3))
        self.out, self.norm = nn.Linear(48, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.out(self.q_proj(x) * self.k_proj(x) + self.v_proj(x)))


def pair(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    return Block(), Block()


def pack(model: nn.Module, format: str) -> nn.Module:
    fp8_compile.pack(model, format=format, method="rtn", include=("*",), progress=False)
    return model


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_updated_tensors_are_those_of_packing_again_and_stay_where_they_are(format: str) -> None:
    first, second = pair()
    packed, expected = pack(first, format), pack(copy.deepcopy(second), format)
    before = {name: value.data_ptr() for name, value in packed.named_buffers()}
    assert fp8_compile.update_packed(packed, second.state_dict()) == [
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "out.weight"
    ]  # fmt: skip
    wanted = expected.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in packed.state_dict().items())
    assert before == {name: value.data_ptr() for name, value in packed.named_buffers()}


def test_compiled_code_sees_new_weights_without_a_new_graph() -> None:
    first, second = pair()
    packed = pack(first, "nvfp4")
    compiled, x = torch.compile(packed, backend="fp8"), torch.randn(8, 64)
    with torch.no_grad():
        before = compiled(x)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        fp8_compile.update_packed(compiled, second.state_dict())
        after = compiled(x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        torch.testing.assert_close(after, pack(second, "nvfp4")(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, after)


def test_a_part_of_the_model_leaves_siblings_as_they_are() -> None:
    first, second = pair()
    packed = pack(first, "nvfp4")
    kept = packed.k_proj.dequantize()
    fp8_compile.update_packed(packed, {"q_proj.weight": 10 * second.q_proj.weight})
    assert torch.equal(packed.k_proj.dequantize(), kept)
    assert (packed.q_proj.dequantize() / 10 - second.q_proj.weight).norm() < 0.2 * second.q_proj.weight.norm()


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("q_proj.weight", torch.zeros(3, 3), "q_proj.weight: expected floats of shape"),
        ("other.weight", torch.zeros(3, 3), "other.weight: the packed model has no such weight"),
        ("norm.weight", torch.zeros(3), "norm.weight: expected shape"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(name: str, value: torch.Tensor, match: str) -> None:
    first, second = pair()
    packed = pack(first, "nvfp4")
    before = copy.deepcopy(packed.state_dict())
    with pytest.raises(ValueError, match=match):
        fp8_compile.update_packed(packed, {"out.weight": second.out.weight, name: value})
    assert all(torch.equal(value, before[key]) for key, value in packed.state_dict().items())


def test_backward_after_an_update_is_refused_instead_of_wrong() -> None:
    first, second = pair()
    packed = pack(first, "nvfp4")
    y = packed(torch.randn(4, 64, requires_grad=True))
    fp8_compile.update_packed(packed, second.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert isinstance(packed.out, PackedLinear)
