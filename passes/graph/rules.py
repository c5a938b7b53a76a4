"""What decides about matmuls beside the matmul itself."""

from __future__ import annotations

import dataclasses
from typing import Callable

import torch

from fp8_compile.kernels.formats import Format

from .roles import Role


def _none(module: str) -> frozenset[str]:
    return frozenset()


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the config asks for and the target can do, as far as a matmul's decision needs it."""

    recipe: str
    target: str
    forward: Format
    backward: Format
    excluded: Callable[[str, tuple[str, ...]], str | None]  # (module, its parameters) -> reason
    min_dim: int = 16
    unquantized: frozenset[Role] = frozenset()
    recipe_supported: bool = True
    alignment: int = 16
    needs_k_contiguous: bool = True
    reads_any_layout: bool = False
    e5m2_by_e5m2: bool = False
    stochastic: frozenset[Role] = frozenset()  # roles of tensors that are rounded at random
    only_output: torch.dtype | None = None  # the one dtype that the recipe's gemm can write
    high: Callable[[str], frozenset[str]] = _none  # module -> its gemms that are in high precision for now
    gradients: str = "quantized"  # or "high_precision", "dequantized": what backward products read
    four_over_six: bool = False  # forward operands choose between two scales per block of E2M1
    grouped: frozenset[str] = frozenset({"fp8"})  # kinds of gemms that there are for ragged groups: "fp8", "mxfp8"

    @property
    def block_scaled(self) -> str | None:
        """The recipe whose gemms multiply blocks along K, if they do: from compute capability 10.0 on those of MXFP8
        multiply blockwise's, too, with scales that are powers of two."""
        if self.recipe == "blockwise" and self.target.startswith("cuda:") and int(self.target[len("cuda:") :]) >= 100:
            return "mxfp8"
        return self.recipe if self.recipe in ("mxfp8", "nvfp4") else None
