"""Lightning: compile the model in a module, or the module, as usual, and attach with a callback.

    self.model.compile(backend="fp8")                                   in the module's __init__
    trainer = lightning.Trainer(..., callbacks=[fp8_compile.lightning.Fp8Callback(loss_scale="dynamic")])
    trainer.fit(module, data)

The callback's state goes into Lightning's checkpoints and comes back from them.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from .training.attach import Training, attach


class Fp8Callback(Callback):
    """``Fp8Callback(**options)`` calls ``attach(module, optimizer, **options)`` when training starts."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.training: Training | None = None
        # A checkpoint is read before there is an optimizer.
        self._loaded: dict[str, Any] | None = None
        self._optimizer_state: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"Fp8Callback attaches to one optimizer, the module has {len(trainer.optimizers)}; expected one, or "
                "fp8_compile.attach() by hand for each part of the model that has its own"
            )
        if self.training is not None:
            self.training.detach()
        self.training = attach(pl_module, trainer.optimizers[0], **self.options)
        if self._loaded:
            # Lightning has loaded the optimizer already, but without masters: rounded to 16 bits.
            if self.training.master_weights is not None and self._optimizer_state is not None:
                self.training.optimizer.load_state_dict(self._optimizer_state)
            self.training.load_state_dict(self._loaded)
        self._loaded = self._optimizer_state = None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._optimizer_state = next(iter(checkpoint.get("optimizer_states", ())), None)

    def state_dict(self) -> dict[str, Any]:
        return self.training.state_dict() if self.training is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
