"""FP32 masters: a 16-bit model is trained as an FP32 one would be on the same gradients, whatever the optimizer."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_compile import MasterWeights

optim = torch.optim
OPTIMIZERS = [
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": False, "amsgrad": True}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adagrad, {}),  # makes its state when it is constructed
    (optim.RMSprop, {}),
    (optim.Adafactor, {}),
    (optim.NAdam, {}),
    (optim.Muon, {}),
]


def gradients(*models: nn.Module, dtype: torch.dtype) -> None:
    """The same random gradients for all of them, rounded to ``dtype``."""
    for parameters in zip(*(model.parameters() for model in models)):
        gradient = torch.randn_like(parameters[0]).to(dtype)
        for parameter in parameters:
            parameter.grad = gradient.to(parameter.grad_dtype)


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind, options", OPTIMIZERS, ids=lambda item: getattr(item, "__name__", str(item)))
def test_masters_follow_an_fp32_model_bit_for_bit(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8, bias=False).to(dtype)
    reference = copy.deepcopy(model).float()
    optimizer, expected = (kind(one.parameters(), lr=1e-3, **options) for one in (model, reference))
    masters = MasterWeights(optimizer)
    schedulers = [optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, expected)]
    for step in range(4):
        gradients(model, reference, dtype=dtype)
        for one, scheduler in zip((optimizer, expected), schedulers):
            one.step()
            scheduler.step()
            one.zero_grad()
        assert model.weight.grad is None and optimizer.param_groups[0]["params"][0] is model.weight
        if step == 1:  # a round trip that leaves no trace
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(masters.fp32_params()[0], reference.weight)
    assert torch.equal(model.weight, reference.weight.to(dtype))
    assert equal(optimizer.state_dict(), expected.state_dict()), "state in FP32, as the FP32 model's"
    assert masters.memory_bytes() == 8 * 8 * 4


def test_groups_of_mixed_dtypes_and_parameters_that_come_later() -> None:
    model = nn.ModuleList([nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4)])
    late = nn.Linear(4, 4).to(torch.bfloat16)
    whole = copy.deepcopy(nn.ModuleList([*model, late])).float()
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(whole, (1e-2, 1e-3, 1e-4))]
    expected = optim.AdamW(groups[:2])
    optimizer = optim.AdamW(
        [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[1].parameters(), "lr": 1e-3}]
    )
    masters = MasterWeights(optimizer)
    assert masters.fp32_params()[2:] == list(model[1].parameters()), "FP32 parameters are their own masters"
    both = nn.ModuleList([*model, late])
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": late.parameters(), "lr": 1e-4})
            expected.add_param_group(groups[2])
        gradients(both, whole, dtype=torch.bfloat16)
        optimizer.step()
        expected.step()
    assert all(map(torch.equal, masters.fp32_params(), whole.parameters()))
    assert masters.memory_bytes() == 2 * (16 + 4) * 4


def test_a_weight_that_was_changed_becomes_the_master_and_others_keep_theirs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=1e-4)
    masters = MasterWeights(optimizer)
    gradients(model, dtype=torch.bfloat16)
    optimizer.step()
    kept = [master.clone() for master in masters.fp32_params()]
    assert not torch.equal(kept[0], model[0].weight.float()), "the master holds more than the weight"
    with torch.no_grad():
        model[1].weight.fill_(3)
    masters.sync()
    assert torch.equal(masters.fp32_params()[0], kept[0])
    assert torch.equal(masters.fp32_params()[2], torch.full((4, 4), 3.0))
    model[0].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
    gradients(model, dtype=torch.bfloat16)
    model[0].weight.grad.zero_()
    optimizer.step()
    assert torch.equal(model[0].weight, torch.ones(4, 4, dtype=torch.bfloat16)), "not the old master's value again"


def test_saved_masters_come_back_and_those_of_another_model_are_refused() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    masters = MasterWeights(optimizer, {model.weight: "weight", model.bias: "bias"})
    gradients(model, dtype=torch.bfloat16)
    optimizer.step()
    saved = masters.state_dict()
    assert set(saved) == {"weight", "bias"} and all(tensor.dtype == torch.float32 for tensor in saved.values())
    gradients(model, dtype=torch.bfloat16)
    optimizer.step()
    masters.load_state_dict(saved)
    assert torch.equal(masters.fp32_params()[0], saved["weight"])
    assert torch.equal(model.weight, saved["weight"].to(torch.bfloat16))
    with pytest.raises(ValueError, match="on one side only: bias.*same model"):
        masters.load_state_dict({"weight": saved["weight"]})


def test_a_model_without_16_bit_parameters_has_no_masters_to_load_or_to_sync() -> None:
    model = nn.Linear(4, 4)
    masters = MasterWeights(optim.SGD(model.parameters(), lr=1.0))
    masters.load_state_dict(masters.state_dict())
    masters.sync()
    assert masters.memory_bytes() == 0 and masters.fp32_params()[0] is model.weight


class Failing(optim.Adam):
    """Fails behind the update of the first ``after`` parameters."""

    after: int | None = None

    def step(self, closure: Any = None) -> Any:
        if self.after is None:
            return super().step(closure)
        (group,) = self.param_groups
        self.param_groups = [{**group, "params": group["params"][: self.after]}]
        super().step(closure)
        self.param_groups = [group]
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("after", [1, 2])
def test_a_step_that_fails_in_the_middle_leaves_what_torch_would_leave_without_masters(after: int) -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    plain = copy.deepcopy(model).to(torch.float32)
    optimizer, expected = Failing(model.parameters(), lr=0.1), Failing(plain.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    for step in range(3):
        gradients(model, dtype=torch.bfloat16)
        for one, other in zip(model.parameters(), plain.parameters()):
            other.grad = one.grad.float()
        for one in (optimizer, expected):
            one.after = after if step == 1 else None
            with pytest.raises(RuntimeError, match="out of memory") if step == 1 else contextlib.nullcontext():
                one.step()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        assert equal(list(masters.state_dict().values()), [one.detach() for one in plain.parameters()])
        assert equal(model.state_dict(), {name: one.bfloat16() for name, one in plain.state_dict().items()})
        assert equal(optimizer.state_dict()["state"], expected.state_dict()["state"])
        optimizer.zero_grad()
        assert all(one.grad is None for one in model.parameters())


def test_a_state_that_does_not_load_does_not_leave_masters_in_the_optimizer() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    MasterWeights(optimizer)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_schedulers_find_a_step_that_they_can_count_before_masters_and_behind_them() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    own = optimizer.step.__func__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = optim.lr_scheduler.ConstantLR(optimizer, 0.5)
        masters = MasterWeights(optimizer)
        second = optim.lr_scheduler.ConstantLR(optimizer, 0.5)
        for _ in range(3):
            gradients(model, dtype=torch.bfloat16)
            optimizer.step()
            first.step()
            second.step()
    masters.detach()
    assert getattr(optimizer.step, "_wrapped_by_lr_sched", False), "the scheduler's is left there"
    other = optim.SGD(nn.Linear(4, 4).parameters(), lr=1.0)
    MasterWeights(other).detach()
    assert "step" not in other.__dict__ and other.step.__func__ is own


def test_detached_masters_leave_the_optimizer_to_itself_and_lbfgs_is_refused() -> None:
    model = nn.Linear(4, 4).half()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    masters = MasterWeights(optimizer)
    assert model.weight.grad_dtype == torch.float32, "FP16 parameters get FP32 gradients"
    masters.detach()
    assert model.weight.grad_dtype == torch.float16
    master = masters.fp32_params()[0].clone()
    gradients(model, dtype=torch.float16)
    optimizer.step()
    assert torch.equal(masters.fp32_params()[0], master)
    with pytest.raises(ValueError, match="LBFGS"):
        MasterWeights(optim.LBFGS(model.parameters()))
