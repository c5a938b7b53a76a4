"""Train a byte language model in FP8 with Lightning.

    python examples/train_lightning.py [--steps 60]             # needs lightning

Two lines are of interest: the model is compiled in place, and the callback attaches master weights.
"""

from __future__ import annotations

import argparse
import itertools

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fp8_compile
from byte_lm import ByteLM, batches, stdlib_text
from fp8_compile.lightning import Fp8Callback

BATCH, TIME = 8, 64


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = ByteLM(layers=2, d=128, heads=4, hidden=384, context=TIME)
        self.model.compile(backend="fp8")  # not the whole module: Dynamo can't trace self.log

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.model(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    module = Module().to(torch.bfloat16)
    source = batches(stdlib_text(), batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(0))
    callback = Fp8Callback(loss_scale="dynamic", master_weights=True)
    trainer = lightning.Trainer(
        max_steps=options.steps, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        callbacks=[callback],
    )
    data = DataLoader(list(itertools.islice(source, options.steps)), batch_size=None)  # batches as they are
    trainer.fit(module, data)
    slots = len(fp8_compile.scaling_state(module.model).stats())
    print(f"{callback.training.steps} steps in FP8, {callback.training.skipped_steps} skipped, {slots} scaled tensors")


if __name__ == "__main__":
    main()
