"""The formats: how many bits, how large, which torch dtype on which hardware."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Format:
    """An 8-bit floating point format, or a 4-bit one in pairs: ``significand_bits`` counts the implicit one."""

    name: str
    dtype: torch.dtype
    max: float
    significand_bits: int
    min_exponent: int  # of the smallest normal number

    def __str__(self) -> str:
        return self.name


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 4, -6)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 3, -14)
# MI300 (gfx942) has formats of its own: no infinity, one NaN, an exponent bias one higher.
E4M3_FNUZ = Format("e4m3fnuz", torch.float8_e4m3fnuz, 240.0, 4, -7)
E5M2_FNUZ = Format("e5m2fnuz", torch.float8_e5m2fnuz, 57344.0, 3, -15)
# Two values in a byte, up to 6, in blocks that each have a scale in E4M3, up to 448: 6 * 448 is the largest value.
E2M1 = Format("e2m1", torch.float4_e2m1fn_x2, 2688.0, 2, 0)

BY_NAME = {"e4m3": E4M3, "e5m2": E5M2}
BY_DTYPE = {format.dtype: format for format in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)}
FORMATS = (*BY_DTYPE.values(), E2M1)


def format_with_max(largest: float) -> Format:
    """A format whose largest value that is; formats that share it are of one kind."""
    return next(format for format in FORMATS if format.max == largest)


def format_named(name: str) -> Format:
    """The format that prints itself like that."""
    return next(format for format in FORMATS if format.name == name)


def format_of(dtype: torch.dtype) -> Format:
    """The format of a float8 dtype."""
    if dtype not in BY_DTYPE:
        raise TypeError(f"{dtype} is not an FP8 dtype; expected one of {', '.join(map(str, BY_DTYPE))}")
    return BY_DTYPE[dtype]
