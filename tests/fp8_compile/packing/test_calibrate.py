"""calibrate: what it keeps, who shares it, what a batch may be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8_compile import Calibration, calibrate


class Block(nn.Module):
    """q, k, v of one tensor; ``later`` sees other inputs in training mode than in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.drop(x * scale)
        return self.out(self.q_proj(x) * self.k_proj(x) + self.v_proj(x))


def test_amax_and_hessian_are_those_of_all_tokens_and_qkv_share_one() -> None:
    model, batches = Block(), [torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(1, 8)]
    model.out.eval()
    found = calibrate(model, iter(batches), progress=False)
    x = torch.cat([batch.reshape(-1, 8) for batch in batches])
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(found.hessian(name), x.t() @ x / len(x))
        assert found.amax(name) == x.abs().max() and found.tokens(name) == len(x) == 11
    assert found.shares("q_proj", "v_proj") and not found.shares("q_proj", "out")
    assert found.memory_bytes() == 2 * 8 * 8 * 4, "two Hessians for four layers"
    assert found.groups() == [("k_proj", "q_proj", "v_proj"), ("out",)]
    assert found.batches is None, "an iterator can't be read again"
    assert model.training and not model.out.training, "every module has its own mode back"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_batch_is_a_tensor_a_tuple_or_a_dict() -> None:
    model, x = Block().eval(), torch.randn(5, 8)
    plain = calibrate(model, [x, x], progress=False)
    for batch in ((x, 1.0), {"x": x, "scale": 1.0}, [x]):
        torch.testing.assert_close(calibrate(model, [batch], progress=False).hessian("out"), plain.hessian("out"))
    assert calibrate(model, [(x, 3.0)], progress=False).amax("q_proj") == (3 * x).abs().max()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(calibrate(compiled, [x], progress=False).hessian("out"), plain.hessian("out"))
    amaxes = calibrate(model, [x], hessians=False, progress=False)
    assert amaxes.amax("out") > 0 and amaxes.memory_bytes() == 0
    with pytest.raises(ValueError, match="out: this calibration has no Hessians"):
        amaxes.hessian("out")


class Moody(nn.Module):
    """Two layers that see the same tensor or not, one of them sometimes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "apart":
            return self.a(x) + self.b(x + 1)
        if how == "in place":
            return self.a(x) + self.b(x.add_(1))
        return self.a(x) + self.b(x) + (self.a(2 * x) if how == "twice" else 0)


HOWS = [("same", "apart"), ("same", "in place"), ("twice", "same"), ("same", "twice", "same")]


@pytest.mark.parametrize("hows", HOWS)
def test_layers_whose_inputs_differ_are_told_apart_each_with_what_it_saw(hows: tuple[str, ...]) -> None:
    batches = [(torch.randn(6, 4), how) for how in hows]
    seen: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for x, how in batches:
        seen["a"] += [x, 2 * x] if how == "twice" else [x]
        seen["b"] += [x + 1] if how in ("apart", "in place") else [x]
    found = calibrate(Moody(), [(x.clone(), how) for x, how in batches], progress=False)
    for name, inputs in seen.items():
        x = torch.cat(inputs)
        torch.testing.assert_close(found.hessian(name), x.t() @ x / len(x))
    assert not found.shares("a", "b")
    assert calibrate(Moody(), [(torch.randn(6, 4), "same")] * 2, progress=False).shares("a", "b")


def test_errors_name_the_layer_and_the_remedy() -> None:
    with pytest.raises(ValueError, match="got no batches"):
        calibrate(Block(), [], progress=False)
    with pytest.raises(ValueError, match=r"q_proj: its input has Inf or NaN.*wider dtype"):
        calibrate(Block(), [torch.full((2, 8), torch.inf)], progress=False)
    with pytest.raises(TypeError, match="a batch is a tensor, a tuple.*got str"):
        calibrate(Block(), ["text"], progress=False)
    with pytest.raises(ValueError, match="no linear layer ran"):
        calibrate(nn.ReLU(), [torch.ones(2)], progress=False)
    with pytest.raises(ValueError, match="'nothing' are no linear layers"):
        calibrate(Block(), [torch.ones(2, 8)], layers=["nothing"], progress=False)
    with pytest.raises(ValueError, match="'head' was not calibrated"):
        Calibration().amax("head")
