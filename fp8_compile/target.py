"""What the device that will run the code can do in FP8.

The graph is rewritten for a target, not for the machine it is compiled on: ``Target.parse("cuda:90")`` takes an
H100's decisions on a laptop.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from .kernels.formats import E2M1, E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, Format

RECIPES_EVERYWHERE = frozenset({"tensorwise", "delayed"})


@dataclasses.dataclass(frozen=True)
class Target:
    """A device kind and its limits for ``_scaled_mm``."""

    name: str  # "cpu", "cuda:90", "hip:gfx942"
    e4m3: Format = E4M3
    e5m2: Format = E5M2
    alignment: int = 16  # K and N must be multiples of it
    needs_k_contiguous: bool = True  # left operand row-major, right operand column-major
    reads_any_layout: bool = False  # cuBLASLt does, though torch does not while it traces
    e5m2_by_e5m2: bool = False
    recipes: frozenset[str] = RECIPES_EVERYWHERE
    rowwise_output: torch.dtype | None = torch.bfloat16  # the only output dtype of rowwise and blockwise gemms
    grouped: frozenset[str] = frozenset()  # kinds of gemms that it has for ragged groups: "fp8", "mxfp8"

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def format(self, name: str) -> Format:
        return {"e4m3": self.e4m3, "e5m2": self.e5m2, "e2m1": E2M1}[name]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target called ``text``; an unknown one is an error that lists the known ones."""
        if text == "cpu":
            return CPU
        if isinstance(text, str) and (match := re.fullmatch(r"cuda:(\d+)", text)):
            capability = int(match[1])
            if capability < 89:
                raise ValueError(f"target={text!r}: FP8 matmuls need compute capability 89 (Ada) or newer")
            return _cuda(capability)
        if isinstance(text, str) and (match := re.fullmatch(r"hip:(gfx\w+)", text)):
            if match[1] in _HIP:
                return _HIP[match[1]]
        raise ValueError(
            f"target={text!r} is unknown; expected 'cpu', 'cuda:<capability>' such as 'cuda:90' or 'cuda:100', "
            f"or one of {', '.join(repr(target.name) for target in _HIP.values())}"
        )

    @classmethod
    def of_device(cls, device: torch.device) -> Target:
        """Return the target for a device of this machine."""
        if device.type == "cpu":
            return CPU
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {device.type!r} is not on this machine; set target='cuda:90' or the like")
        if device.type == "cuda" and torch.version.hip:
            return cls.parse("hip:" + torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            return cls.parse(f"cuda:{10 * major + minor}")
        raise ValueError(f"device {device.type!r} has no FP8 matmul; expected 'cpu' or 'cuda', or set target=")


def _cuda(capability: int) -> Target:
    # cuBLAS has 1x128 and 128x128 block scales on Hopper only; on Blackwell both blocks are multiplied in MXFP8.
    recipes = RECIPES_EVERYWHERE | {"rowwise"} | ({"blockwise"} if capability == 90 or capability >= 100 else set())
    if capability >= 100:
        recipes |= {"mxfp8", "nvfp4"}
    # cuBLASLt needs K contiguous ("TN") on Ada, Hopper, and on the Blackwells of workstations, 12.x.
    return Target(
        f"cuda:{capability}",
        recipes=frozenset(recipes),
        reads_any_layout=capability // 10 == 10,
        # torch._scaled_grouped_mm multiplies FP8 with a scale per row on 9.0, MXFP8 on 10.x, and nothing elsewhere.
        grouped=frozenset({"fp8"} if capability == 90 else {"mxfp8"} if capability // 10 == 10 else ()),
    )


# Our CPU gemm multiplies in FP32 after an exact upcast: any shape, any layout, any pair of formats.
CPU = Target(
    "cpu",
    alignment=1,
    needs_k_contiguous=False,
    e5m2_by_e5m2=True,
    recipes=frozenset(RECIPES_EVERYWHERE | {"rowwise", "blockwise", "mxfp8", "nvfp4"}),
    rowwise_output=None,
    grouped=frozenset({"fp8", "mxfp8"}),
)
_HIP = {
    "gfx942": Target("hip:gfx942", e4m3=E4M3_FNUZ, e5m2=E5M2_FNUZ, recipes=frozenset(RECIPES_EVERYWHERE | {"rowwise"})),
    "gfx950": Target("hip:gfx950", recipes=frozenset(RECIPES_EVERYWHERE | {"rowwise"})),
}
