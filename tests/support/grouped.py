"""Layers of experts for tests: as PyTorch's own operation has them, and as Hugging Face's models do in FP32.

    exact(x, w, offsets, dy)               output, gradient of the input, gradient of the weight, in FP64
    in_fp8(x, w, offsets, dy, recipe)      the same, each operand rounded to FP8 before
    results(model, x, offsets, dy)         the same from a layer

The rounding is ``fp8_reference``'s, matrix by matrix: no code of ``kernels/`` takes part.
"""

from __future__ import annotations

import fp8_reference
import numpy as np
import torch
import transformers.integrations.moe  # noqa: F401  registers grouped_mm_fallback
from fp8_reference import Fp8
from torch import Tensor, nn


class Experts(nn.Module):
    """``x [T, K] @ w [experts, K, N]``; ``transposed``: w is kept as [experts, N, K], as most models do."""

    def __init__(self, experts: int, k: int, n: int, *, transposed: bool = True, dtype: torch.dtype) -> None:
        super().__init__()
        self.transposed = transposed
        shape = (experts, n, k) if transposed else (experts, k, n)
        self.w = nn.Parameter((torch.randn(shape) / k**0.5).to(dtype))

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        w = self.w.transpose(1, 2) if self.transposed else self.w
        if x.dtype == torch.bfloat16:
            return torch.nn.functional.grouped_mm(x, w, offs=offsets)
        return torch.ops.transformers.grouped_mm_fallback(x, w, offsets)


class Layer(nn.Module):
    """Experts inside a module, so that they have a name, as in a model."""

    def __init__(self, *args: int, **kwargs: object) -> None:
        super().__init__()
        self.experts = Experts(*args, **kwargs)  # type: ignore[arg-type]

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.experts(x, offsets)

    @property
    def weight(self) -> Tensor:
        """[experts, K, N]."""
        w = self.experts.w.detach()
        return w.transpose(1, 2) if self.experts.transposed else w


def offsets_of(*sizes: int) -> Tensor:
    """Where groups of these sizes end."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def exact(x: Tensor, w: Tensor, offsets: Tensor, dy: Tensor) -> dict[str, np.ndarray]:
    """Output and gradients in FP64; w is [experts, K, N]."""
    x, w, dy = (fp8_reference.to_numpy(side) for side in (x, w, dy))
    return products(offsets, (x, w), (dy, w), (x, dy))


def in_fp8(
    x: Tensor, w: Tensor, offsets: Tensor, dy: Tensor, recipe: str = "tensorwise", backward: Fp8 | None = None
) -> dict[str, np.ndarray]:
    """The same of what is left of the operands in FP8: a scale a tensor, or one a row of the gemm (of each expert, and
    of all tokens where the contraction goes over them)."""
    x, w, dy = (fp8_reference.to_numpy(side, np.float32) for side in (x, w, dy))
    how = fp8_reference.recipe(recipe)
    backward = backward or how.backward

    def rounded(matrix: np.ndarray, format: Fp8, contracted: int) -> np.ndarray:
        block = (-1, -1) if recipe == "tensorwise" else (-1, 1) if contracted == 0 else (1, -1)
        return fp8_reference.quantize(matrix, format, block).dequantized

    def experts(contracted: int) -> np.ndarray:
        if recipe == "tensorwise":
            return rounded(w.reshape(-1, w.shape[2]), how.forward, contracted).reshape(w.shape)
        return np.stack([rounded(one, how.forward, contracted) for one in w])

    output = rounded(x, how.forward, 1), experts(0)
    grad_input = rounded(dy, backward, 1), experts(1)
    return products(offsets, output, grad_input, (rounded(x, how.forward, 0), rounded(dy, backward, 0)))


Pair = tuple[np.ndarray, np.ndarray]


def products(offsets: Tensor, output: Pair, grad_input: Pair, grad_weight: Pair) -> dict[str, np.ndarray]:
    """The three gemms, each of operands of its own."""
    (x, w), (dy, w_again), (x_again, dy_again) = output, grad_input, grad_weight
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        some = slice(start, end)
        y[some], dx[some] = x[some] @ w[expert], dy[some] @ w_again[expert].T
        dw[expert] = x_again[some].T @ dy_again[some]
        start = end
    return {"output": y, "grad_input": dx, "grad_weight": dw}


def results(model: nn.Module, x: Tensor, offsets: Tensor, dy: Tensor) -> dict[str, np.ndarray]:
    """What a layer, compiled or not, gives for the same; the gradient of its weight as [experts, K, N]."""
    experts = getattr(model, "_orig_mod", model).experts
    experts.w.grad = None
    x = x.detach().clone().requires_grad_()
    y = model(x, offsets)
    y.backward(dy)
    dw = experts.w.grad.transpose(1, 2) if experts.transposed else experts.w.grad
    return {name: fp8_reference.to_numpy(t) for name, t in (("output", y), ("grad_input", x.grad), ("grad_weight", dw))}
