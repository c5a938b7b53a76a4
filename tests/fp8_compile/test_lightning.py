"""Lightning trains a compiled module, attaches by a callback, and resumes from its own checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from fp8_compile import scaling_state  # noqa: E402
from fp8_compile.lightning import Fp8Callback  # noqa: E402

D = 32


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(epochs: int, folder: Path, start: str | None = None) -> tuple[nn.Module, Fp8Callback, str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, callback = Module().to(torch.bfloat16), Fp8Callback(loss_scale="dynamic", master_weights=True)
    data = DataLoader(TensorDataset(torch.randn(64, D).to(torch.bfloat16)), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        gradient_clip_val=0.1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(torch.compile(module, backend="fp8"), data, ckpt_path=start, weights_only=True if start else None)
    return module, callback, trainer.checkpoint_callback.best_model_path


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_in_fp8_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    _, _, checkpoint = trained(1, tmp_path / "first")
    whole, callback, _ = trained(2, tmp_path / "whole")
    state = scaling_state(whole).state_dict()
    assert {key.partition("#")[0] for key in state} == {"layers.0", "layers.2"}
    assert (callback.training.steps, callback.training.loss_scale) == (4, 2.0**16)
    resumed, again, _ = trained(2, tmp_path / "resumed", start=checkpoint)
    assert again.training.steps == 4
    pairs = zip(callback.training.master_weights.fp32_params(), again.training.master_weights.fp32_params())
    assert all(torch.equal(one, two) for one, two in pairs)
    after = scaling_state(resumed).state_dict()
    assert state.keys() == after.keys() and all(torch.equal(state[key], after[key]) for key in state)
