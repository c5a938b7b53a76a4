"""Which instruction sets are tried."""

from __future__ import annotations

import pytest

from fp8_compile.kernels.cpu import isa


@pytest.mark.parametrize(
    "features, names",
    [
        (isa.ISAS["amx"].needs, ["amx", "avx512_bf16", "avx512", "avx2", "portable"]),
        (isa.ISAS["avx512_bf16"].needs | {"amx_tile"}, ["avx512_bf16", "avx512", "avx2", "portable"]),
        (isa.ISAS["avx2"].needs, ["avx2", "portable"]),
        (frozenset(), ["portable"]),
    ],
)
def test_those_that_the_cpu_claims_are_tried_best_first(features, names, monkeypatch) -> None:
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    monkeypatch.setattr(isa, "cpu_features", lambda: frozenset(features))
    assert [one.name for one in isa.candidates()] == names


def test_one_can_be_forced_and_an_unknown_one_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, "amx_emulated")
    assert [one.name for one in isa.candidates()] == ["amx_emulated"]
    monkeypatch.setenv(isa.VARIABLE, "sse9")
    with pytest.raises(ValueError, match="FP8_COMPILE_CPU_ISA='sse9' is unknown; expected one of: amx, "):
        isa.candidates()


def test_flags_are_the_compilers_names_of_what_is_needed() -> None:
    assert {"-mavx512bf16", "-mamx-tile", "-mamx-bf16"} <= set(isa.ISAS["amx"].flags)
    assert isa.ISAS["portable"].flags == ()


def test_what_is_wanted_is_used_where_the_cpu_has_it(monkeypatch) -> None:
    one = isa.ISAS["avx512"]
    monkeypatch.setattr(isa, "cpu_features", lambda: one.needs | {"avx512_vnni"})
    assert set(isa.with_wanted(one).flags) - set(one.flags) == {"-mavx512vnni"}
    monkeypatch.setattr(isa, "cpu_features", lambda: one.needs)
    assert isa.with_wanted(one) == one
