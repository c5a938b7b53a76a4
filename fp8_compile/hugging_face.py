"""Hugging Face ``Trainer`` and ``accelerate``: importing this lets them take ``"fp8"`` for a backend.

    import fp8_compile.hugging_face
    TrainingArguments(..., torch_compile=True, torch_compile_backend="fp8")
    Accelerator(dynamo_backend="fp8")

accelerate keeps a closed list of the backends that it passes on to ``torch.compile``; this adds one. Without the
import, ``model.compile(backend="fp8")`` before the Trainer is made does the same.

    Trainer(..., callbacks=[fp8_compile.hugging_face.Fp8Callback(loss_scale="dynamic", master_weights=True)])

is :func:`fp8_compile.attach` for a Trainer; its state is saved and loaded with the Trainer's checkpoints.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from transformers import TrainerCallback

from .torch_internals.transformers import optimizer_file
from .training.attach import Training, attach

STATE_FILE = "fp8_training.pt"


def _allow(name: str) -> None:
    """Add a member to accelerate's list of backends, as if it had been written there."""
    if name in DynamoBackend.__members__:
        return
    member = str.__new__(DynamoBackend, name)
    member._name_, member._value_ = name, name
    DynamoBackend._member_map_[name] = DynamoBackend._value2member_map_[name] = member
    DynamoBackend._member_names_.append(name)


_allow("FP8")


class Fp8Callback(TrainerCallback):
    """``Fp8Callback(**options)`` calls ``attach(model, optimizer, **options)`` when training begins."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.training: Training | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training is not None:  # train() was called again
            self.training.detach()
        self.training = attach(kwargs["model"], kwargs["optimizer"], **self.options)
        if state.global_step:
            self._resume(_checkpoint(args, state))

    def _resume(self, folder: pathlib.Path) -> None:
        assert self.training is not None
        if not (folder / STATE_FILE).exists():
            raise ValueError(
                f"{folder} has no {STATE_FILE}: it was saved without Fp8Callback, or elsewhere than in output_dir; "
                "expected a checkpoint of a run with the same callback"
            )
        # The Trainer has loaded it already, but into an optimizer without masters: rounded to 16 bits.
        optimizer = folder / optimizer_file()
        if self.training.master_weights is not None and optimizer.exists():
            saved = torch.load(optimizer, map_location="cpu", weights_only=True)
            self.training.optimizer.load_state_dict(saved)
        self.training.load_state_dict(torch.load(folder / STATE_FILE, weights_only=True))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training is not None:
            torch.save(self.training.state_dict(), _checkpoint(args, state) / STATE_FILE)


def _checkpoint(args: Any, state: Any) -> pathlib.Path:
    return pathlib.Path(args.output_dir) / f"checkpoint-{state.global_step}"
