"""What a margin costs: signal to quantization noise of one scale per tensor that leaves room for larger tensors.

    python benchmarks/margins.py

A margin of m is a scale of F / (amax * 2**m). Rounding is relative, so nothing is lost until small values leave the
format's range: that depends on how far they are below the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.formats import E4M3, E5M2, Format
from fp8_compile.passes.graph.update_rule import MARGINS

SIZE = 1024
SHOWN = {E4M3: (0, 1, 2, 3, 4, 6, 8, 10), E5M2: (0, 2, 4, 6, 8, 12, 18, 20)}


def tensors() -> dict[str, Tensor]:
    """By what they are like, each [SIZE, SIZE]."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(SIZE, SIZE, generator=generator)

    rows = torch.logspace(-16, 0, SIZE, base=2.0)[:, None]
    one_large = normal()
    one_large[0, 0] = 1000.0
    few_large = torch.where(torch.rand(SIZE, SIZE, generator=generator) < 1e-4, 100.0, 1.0)
    return {
        "normal": normal(),
        "log-normal, sigma 1": normal() * normal().exp(),
        "log-normal, sigma 2": normal() * (2 * normal()).exp(),
        "rows scaled by 2**-16 to 1": normal() * rows,
        "1 of 10,000 is 100 times as large": normal() * few_large,
        "one value of 1000": one_large,
        "relu of normal": normal().relu(),
        "softmax": torch.softmax(3 * normal(), dim=-1),
    }


def sqnr(x: Tensor, format: Format, margin: int) -> float:
    """Of the tensor quantized with its own amax and that margin, dB."""
    scale = format.max / (x.abs().max() * 2.0**margin)
    back = (x * scale).clamp(-format.max, format.max).to(format.dtype).double() / scale
    return float(10 * torch.log10((x.double() ** 2).sum() / ((x.double() - back) ** 2).sum()))


def main() -> None:
    for format, margins in SHOWN.items():
        print(f"{format}: SQNR in dB by margin; the default of what flows is {MARGINS[format.significand_bits]}")
        print(f"{'':36}" + "".join(f"{margin:>8}" for margin in margins))
        for name, x in tensors().items():
            print(f"{name:36}" + "".join(f"{sqnr(x, format, margin):8.2f}" for margin in margins))


if __name__ == "__main__":
    main()
