"""Which instructions the C++ kernels are compiled for.

An instruction set is a name, what the CPU must say it has, and the compiler's flags. The best that the CPU claims to
have is compiled and then tried (``fp8_probe`` in ``scaled_mm.cpp``): claims are not enough. ``FP8_COMPILE_CPU_ISA``
forces one, for measuring and testing; ``amx_emulated`` runs the AMX code without AMX, slowly, and is never chosen.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform

VARIABLE = "FP8_COMPILE_CPU_ISA"


@dataclasses.dataclass(frozen=True)
class Isa:
    name: str
    needs: frozenset[str]  # as /proc/cpuinfo calls them
    flags: tuple[str, ...]
    chosen: bool = True  # or only where forced
    wants: frozenset[str] = frozenset()  # used too where the CPU has them


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_WIDE = ("-mprefer-vector-width=512",)
_INT8 = ("avx512_vnni", "avx512vbmi")  # products of bytes, tables of bytes: nvfp4.cpp; not all with AVX-512 have them


def _isa(name: str, needs: tuple[str, ...], *more: str, chosen: bool = True, wants: tuple[str, ...] = ()) -> Isa:
    wanted = frozenset((*_INT8, *wants) if "avx512f" in needs else wants)
    return Isa(name, frozenset(needs), (*map(_flag, needs), *more), chosen, wanted)


def _flag(feature: str) -> str:
    return "-m" + feature.replace("_", "-" if "amx" in feature else "")


# Best first.
ISAS = {
    isa.name: isa
    for isa in (
        _isa("amx", (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"), *_WIDE),
        _isa("avx512_bf16", (*_AVX512, "avx512_bf16"), *_WIDE),
        _isa("avx512", _AVX512, *_WIDE),
        _isa("avx2", _AVX2),
        _isa("portable", ()),
        # What has AMX has dot products of bf16 too, which a few rows go through.
        _isa("amx_emulated", _AVX512, *_WIDE, "-DFP8_EMULATE_AMX", chosen=False, wants=("avx512_bf16",)),
    )
}


def candidates() -> list[Isa]:
    """The instruction sets to try, best first: those that the CPU claims to have, or the one that is forced."""
    forced = os.environ.get(VARIABLE)
    if forced is None:
        features = cpu_features()
        return [with_wanted(isa) for isa in ISAS.values() if isa.chosen and isa.needs <= features]
    if forced not in ISAS:
        raise ValueError(f"{VARIABLE}={forced!r} is unknown; expected one of: {', '.join(ISAS)}, or unset it")
    return [with_wanted(ISAS[forced])]


def with_wanted(isa: Isa) -> Isa:
    """The instruction set with what it wants and this CPU has."""
    return dataclasses.replace(isa, flags=(*isa.flags, *map(_flag, sorted(isa.wants & cpu_features()))))


def cpu_features() -> frozenset[str]:
    """What the CPU says it has, in Linux's words."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
