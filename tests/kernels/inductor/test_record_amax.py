"""An amax recorded where a reduction ends; the rest of the code: tests/fp8_compile/test_generated_gpu_code.py."""

from __future__ import annotations

import re

import torch
from absent_gpu import absent_gpu
from compile_kernels import compile_kernels, kernel_sources
from torch import nn

ROWS, INNER, OUTER = 1000, 64, 50257  # so many sums, of rows that no block divides: one loop over them, not split


class Head(nn.Module):
    """A bias whose gradient is a reduction by itself: its matmul is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.lm_head = nn.Linear(INNER, INNER, bias=False), nn.Linear(INNER, OUTER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.lm_head(self.up(x)), -1)


def test_what_a_looped_reduction_gives_is_recorded_without_the_mask_of_the_loop() -> None:
    """Triton knows no name from inside a loop behind it; the interpreter, being Python, does."""
    with absent_gpu(90) as gpu:
        options = {"target": "cuda:90", "loss_scale": 1024.0}
        step = gpu.training_step(
            lambda: Head().bfloat16(),
            lambda: (torch.empty(ROWS, INNER, dtype=torch.bfloat16, requires_grad=True),),
            backend="fp8",
            options=options,
        )
        recorded = {
            name: text
            for name, text in kernel_sources(step.backward).items()
            if re.search(r"\n    for r0_offset(.*\n)+    tl\.atomic_max\(", text)
        }
        assert recorded
        compiled = {kernel.name for kernel in compile_kernels(step.backward, every_config=False)}
    assert recorded.keys() <= compiled
