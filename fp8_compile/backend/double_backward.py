"""Say clearly that a compiled backward has no backward of its own."""

from __future__ import annotations

from typing import Any, Callable

import torch


def reject_double_backward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a compiled function so that ``create_graph=True`` is an error when it is asked for.

    AOTAutograd would let the first backward pass and fail, without a word on FP8, in the second.
    """

    def forward(*args: Any) -> Any:
        outputs = compiled(*args)
        nodes = {
            output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None
        }
        for node in nodes:
            node.register_prehook(_check)
        return outputs

    return forward


def _check(grad_outputs: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True is not supported under backend='fp8': an FP8 backward has no derivative of its own. "
            "Expected create_graph=False; run the part that needs a second derivative uncompiled "
            "(torch.compiler.disable) or with backend='eager'."
        )
