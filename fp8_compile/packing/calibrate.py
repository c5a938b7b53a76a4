"""Run a model on some batches and record what goes into its layers."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .calibration import Calibration
from .expert_stacks import ExpertStack, expert_stacks
from .linear_layers import linear_layers, unwrapped
from .packed_linear import PackedLinear
from .record_experts import recording_experts


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    hessians: bool = True,
    layers: Sequence[str] | None = None,
    progress: bool = True,
) -> Calibration:
    """The inputs' statistics of every linear layer and expert (or of ``layers``), over ``batches``.

    A batch is a tensor, a tuple or list of positional arguments, or a dict of keyword arguments. The model runs in eval
    mode without gradients, and is left as it was. ``hessians=False`` keeps amaxes only. A list or tuple of batches is
    remembered (not copied), so that ``pack`` can calibrate layers in sequence; an iterator is read once. An expert's
    name is its stack's and its number, ``mlp.experts.gate_up_proj.3``; in ``layers`` the stack's stands for them all.
    """
    root = unwrapped(model)
    again = batches if isinstance(batches, (list, tuple)) else None
    calibration = Calibration(hessians=hessians, batches=again)
    chosen, stacks = _chosen(root, layers)
    ran = 0
    for batch in tqdm(batches, desc="calibrate", disable=not progress):
        run_batch(root, batch, calibration, chosen, stacks)
        ran += 1
    if not ran:
        raise ValueError("calibrate got no batches; expected an iterable of tensors, tuples or dicts of arguments")
    if not calibration.names:
        raise ValueError("no linear layer ran on these batches; expected a model with nn.Linear or Conv1D layers")
    return calibration


def run_batch(
    root: nn.Module,
    batch: Any,
    calibration: Calibration,
    layers: Mapping[str, nn.Module],
    stacks: Mapping[str, ExpertStack],
    *,
    stop: bool = False,
) -> None:
    """Run one batch and record the inputs of ``layers`` and of the experts in ``stacks``; ``stop`` ends the run at the
    last of them."""
    left = {*layers, *stacks}

    def seen(name: str) -> None:
        left.discard(name)
        if stop and not left:
            raise _AllSeen

    def hook(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("input", kwargs.get("x"))
            if isinstance(x, Tensor):
                calibration.record(name, x)
            seen(name)

        return before

    with evaluating(root), torch.no_grad(), contextlib.ExitStack() as hooks:
        for name, module in layers.items():
            handle = module.register_forward_pre_hook(hook(name), with_kwargs=True)
            hooks.callback(handle.remove)
        for name, stack in stacks.items():
            handle = stack.module.register_forward_hook(lambda *_, name=name: seen(name))
            hooks.callback(handle.remove)
        hooks.enter_context(recording_experts(stacks, calibration.record))
        with contextlib.suppress(_AllSeen):
            _call(root, batch)
    calibration.end_batch()


class _AllSeen(Exception):
    """All layers have been seen: the rest of the model need not run."""


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):  # a tokenizer's BatchEncoding too
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    raise TypeError(
        f"a batch is a tensor, a tuple of arguments or a dict of keyword arguments, got {type(batch).__name__}"
    )


def _chosen(root: nn.Module, layers: Sequence[str] | None) -> tuple[dict[str, nn.Module], dict[str, ExpertStack]]:
    found = {**linear_layers(root), **{n: m for n, m in root.named_modules() if isinstance(m, PackedLinear)}}
    stacks = expert_stacks(root)
    if layers is None:
        return found, stacks
    unknown = [name for name in layers if name not in found and name not in stacks]
    if unknown:
        raise ValueError(f"layers: {', '.join(map(repr, unknown))} are no linear layers of the model")
    return {n: found[n] for n in layers if n in found}, {n: stacks[n] for n in layers if n in stacks}


@contextlib.contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Eval mode for the length of a block; every module gets its own mode back."""
    modes = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
