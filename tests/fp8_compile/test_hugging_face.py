"""Hugging Face's Trainer takes "fp8" for a backend, attaches by a callback, and resumes from its own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from fp8_compile import scaling_state  # noqa: E402
from fp8_compile.hugging_face import Fp8Callback  # noqa: E402

D = 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def trained(folder: Path, *, resume: bool = False) -> tuple[nn.Module, Fp8Callback]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    data = [{"x": x, "labels": x.flip(0)} for x in torch.randn(32, D).to(torch.bfloat16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        torch_compile=True,
        torch_compile_backend="fp8",
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        max_grad_norm=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = Fp8Callback(loss_scale="dynamic", master_weights=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return model, callback


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains_in_fp8_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, callback = trained(tmp_path)
    state: dict[str, Any] = scaling_state(whole).state_dict()
    assert {key.partition("#")[0] for key in state} == {"layers.0", "layers.2"}
    assert (callback.training.steps, callback.training.loss_scale) == (4, 2.0**16)
    assert (tmp_path / "checkpoint-2" / "fp8_training.pt").exists()
    resumed, again = trained(tmp_path, resume=True)
    assert again.training.steps == 4
    after = scaling_state(resumed).state_dict()
    assert state.keys() == after.keys() and all(torch.equal(state[key], after[key]) for key in state)
    pairs = zip(callback.training.master_weights.fp32_params(), again.training.master_weights.fp32_params())
    assert all(torch.equal(one, two) for one, two in pairs)
