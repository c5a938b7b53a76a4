"""What the code of every kernel shows, for six GPUs that are not here."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
from triton.compiler import CompiledKernel

from fp8_compile.kernels.gpu.ahead_of_time import TARGETS, compile_for, facts_of
from fp8_compile.kernels.gpu.catalogue import BLACKWELL, CATALOGUE, PRODUCTS, fp8_type

each_target = pytest.mark.parametrize("target", TARGETS)
each_kernel = pytest.mark.parametrize("name", CATALOGUE)


@functools.cache
def compiled(name: str, target: str) -> CompiledKernel:
    return CATALOGUE[name]().compiled(target)


@each_target
@each_kernel
def test_nothing_spills_and_tensors_move_16_bytes_at_a_time(name: str, target: str) -> None:
    entry, facts = CATALOGUE[name](), facts_of(compiled(name, target))
    assert facts.spills == 0
    assert facts.wide_loads > 0
    assert (facts.wide_stores > 0) == entry.wide_stores
    if entry.wide_stores:
        # What is narrow are scales, at most one store for each of their tensors, and single numbers.
        scale_tensors = sum("dequant" in type or "scales" in type for type in entry.types)
        assert facts.narrow_stores <= scale_tensors + entry.numbers


@each_target
@each_kernel
def test_fp8_is_rounded_by_the_hardwares_instruction(name: str, target: str) -> None:
    if name == "nvfp4_pack" and target == "hip:gfx942":
        assert facts_of(compiled(name, target)).fp8_conversions == 0, "MI300 has no OCP E4M3: by shifts and adds"
        return
    entry = CATALOGUE[name]()
    assert (facts_of(compiled(name, target)).fp8_conversions > 0) == entry.fp8_conversions


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@each_target
def test_both_formats_have_their_conversion_and_wide_stores(format: str, target: str) -> None:
    facts = facts_of(CATALOGUE["quantize_many"]().compiled(target, format))
    assert facts.fp8_conversions > 0 and facts.wide_stores > 0 and facts.spills == 0


@pytest.mark.parametrize("name", [*CATALOGUE, *PRODUCTS, *BLACKWELL])
def test_a_size_of_1_is_a_constant_that_a_kernel_can_take(name: str) -> None:
    """The JIT makes one of it; the interpreter doesn't."""
    entry = (CATALOGUE | PRODUCTS | BLACKWELL)[name]()
    sizes = {size: 1 for size, type in entry.types.items() if type in ("i32", "i64")}
    assert sizes
    dataclasses.replace(entry, constants=entry.constants | sizes).compiled("cuda:90")


FLAT = ("nvfp4_pack",)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "update_scales"])
def test_offsets_into_tensors_are_64_bits_wide(name: str) -> None:
    """A tensor may have more than 2**31 elements; one dimension of a matrix has fewer."""
    ir = compiled(name, "cuda:90").asm["ttir"]
    for pointee in {"bf16"} | set(re.findall(r"tt\.store .*x!tt\.ptr<(f8\w*|i8)>>", ir)):
        widths = re.findall(rf"tt\.addptr .*ptr<{pointee}>>?, (?:tensor<[0-9x]+x)?(i\d+)>?", ir)
        assert "i64" in widths, pointee
    # Narrow are row and column numbers alone: no product of vectors, none at all where memory is flat.
    narrow = [line for line in ir.splitlines() if re.search(r"arith\.muli .* : (tensor<.*x)?i32", line)]
    if name in FLAT:
        narrow = [line for line in narrow if "tensor" not in line]
    else:
        narrow = [line for line in narrow if "tensor" in line]
    assert narrow == []


@pytest.mark.parametrize("name", ["quantize_many", "quantize_many, one layout"])
def test_the_amax_is_one_integer_atomic_a_program(name: str) -> None:
    """An atomic maximum of floats loses NaN."""
    ir = compiled(name, "cuda:90").asm["ttir"]
    assert re.findall(r"tt\.atomic_rmw (\w+), relaxed.*!tt\.ptr<(\w+)>", ir) == [("max", "i32")]


@pytest.mark.parametrize("name", ["quantize_many", "quantize_many, one layout"])
def test_no_compiler_drops_the_product_with_zero_that_keeps_inf_visible(name: str) -> None:
    ptx = compiled(name, "cuda:90").asm["ptx"]
    assert len(re.findall(r"(?:fma\.rn|mul)\.f32 .*0f00000000", ptx)) >= 32, "one for each of a thread's elements"
    assert re.search(r"v_\w*(fma|mul)\w*_f32.*\b0\b", compiled(name, "hip:gfx942").asm["amdgcn"])


@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("cuda")])
@each_kernel
def test_nothing_is_clamped_by_instructions_that_make_triton_miscompile_stores_of_bytes(name: str, target: str) -> None:
    """triton#11111: min.NaN and max.NaN beside stores of FP8. NaN is kept by comparisons, as the interpreter shows."""
    asm = compiled(name, target).asm
    assert "tt.clampf" not in asm["ttir"]
    assert re.findall(r"\b(?:min|max)\S*\.NaN\S*", asm["ptx"]) == []


@pytest.mark.parametrize("name", ["quantize_many", "cast_rows_columns", "quantize_blocks 1x128"])
def test_transposed_stores_go_through_an_integer_view(name: str) -> None:
    """triton#11111."""
    pointees = re.findall(r"tt\.store .*x!tt\.ptr<(\w+)>>", compiled(name, "cuda:90").asm["ttir"])
    assert "i8" in pointees and not any(pointee.startswith("f8") for pointee in pointees)


@pytest.mark.parametrize("name", ["update_scales", "quantize_blocks 1x128", "quantize_rows", "nvfp4_pack"])
def test_divisions_are_rounded_to_nearest_as_torchs_are(name: str) -> None:
    ptx = compiled(name, "cuda:90").asm["ptx"]
    assert set(re.findall(r"\bdiv\.\w+\.\w+|\brcp\.\w+\.\w+", ptx)) == {"div.rn.f32"}
    amd = compiled(name, "hip:gfx942").asm["amdgcn"]
    integer_divisions = amd.count("0x4f7ffffe")  # just below 2**32: LLVM divides integers by way of a reciprocal
    assert "v_div_fixup_f32" in amd
    assert amd.count("v_rcp_f32") <= amd.count("v_div_fixup_f32") + integer_divisions


def test_the_percentile_is_computed_without_contracted_products() -> None:
    """A fused multiply-add rounds once where the reference rounds twice. AMD's are those of the divisions."""
    assert "fma" not in compiled("update_scales", "cuda:90").asm["ptx"]
    code = compiled("update_scales", "hip:gfx942").asm["amdgcn"]
    fused = len(re.findall(r"v_fma(c|_)\w*f32", code))
    assert fused == 5 * code.count("v_div_fixup_f32")


@each_target
def test_every_warp_has_read_the_state_before_any_writes_to_it(target: str) -> None:
    """What several warps need each reads for itself; a late one would find what another has written (triton#1615)."""
    code = compiled("update_scales", target).asm["ptx" if target.startswith("cuda") else "amdgcn"]
    kinds = {"read": r"\bld\.global|_load_dword", "write": r"\bst\.global|_store_dword", "wait": r"bar\.sync|s_barrier"}
    order = [kind for line in code.splitlines() for kind, pattern in kinds.items() if re.search(pattern, line)]
    last_read, first_write = len(order) - 1 - order[::-1].index("read"), order.index("write")
    assert "wait" in order[last_read:first_write]


@pytest.mark.parametrize("name", ["quantize_many, checking", "quantize_many, one layout, checking"])
@each_target
def test_every_warp_has_compared_the_fingerprint_before_any_writes_it(name: str, target: str) -> None:
    """A late warp would find the new one and return, and its part of the tile would be left as it was."""
    code = compiled(name, target).asm["ptx" if target.startswith("cuda") else "amdgcn"]
    kinds = {
        "read": r"\bld\.global|_load_dword",
        "write": r"\bst\.global|_store_dword",
        "wait": r"bar\.sync|s_barrier",
        "return": r"^\s*@!?%p\d+ bra|s_cbranch",
    }
    order = [kind for line in code.splitlines() for kind, pattern in kinds.items() if re.search(pattern, line)]
    until_written = order[: order.index("write")]
    returns = until_written.index("return")
    assert "read" in until_written[:returns] and "wait" in until_written[returns:]
    assert order.count("write") > 1 and "read" in order[order.index("write") :], "the tile is read and written after it"


@pytest.mark.parametrize("target, squeeze", [("cuda:90", {"maxnreg": 32}), ("hip:gfx942", {"waves_per_eu": 8})])
def test_a_kernel_that_spills_and_stores_narrowly_is_seen_to(target: str, squeeze: dict[str, int]) -> None:
    """The tests above would pass if nothing was ever counted: too few registers, and rows of any length."""
    entry = CATALOGUE["quantize_blocks 1x128"]()
    fp8 = {name: type.replace("fp8", fp8_type(target, "e5m2")) for name, type in entry.types.items()}
    facts = facts_of(compile_for(target, entry.kernel, fp8, entry.constants, num_warps=4, aligned=False, **squeeze))
    assert facts.spills > 0
    assert facts.wide_stores == 0 and facts.wide_loads == 0 and facts.narrow_stores > 100
