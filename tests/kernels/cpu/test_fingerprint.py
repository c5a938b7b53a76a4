"""The fingerprint in C++ is the reference's, sees any of its samples change, and its samples are all over a matrix."""

from __future__ import annotations

import pytest
import torch

from fp8_compile.kernels.cpu import fingerprint as on_cpu
from fp8_compile.kernels.cpu.fingerprint import Fingerprints
from fp8_compile.kernels.fingerprint import PLACES, SAMPLES, fingerprint, sample_offsets

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (1, 15), (3, 65), (16, 16), (129, 67), (7, 4099), (1024, 48), (0, 4)]


def random_bits(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Any bits: NaN, Inf and zeros with a sign among them."""
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    bounds = torch.iinfo(integers)
    return torch.randint(bounds.min, bounds.max + 1, shape, generator=generator).to(integers).view(dtype)


def test_many_matrices_of_all_dtypes_and_odd_shapes_are_as_the_reference_has_them(generator) -> None:
    tensors = [random_bits(shape, dtype, generator) for shape in SHAPES for dtype in DTYPES]
    found = Fingerprints()(tensors)
    assert found == [fingerprint(x) for x in tensors]
    assert len(set(found)) == len(found) - 2, "of the three empty ones it is the same"


def test_without_a_compiler_it_is_the_reference(monkeypatch: pytest.MonkeyPatch, generator) -> None:
    x = torch.randn(40, 50, generator=generator)
    expected = Fingerprints()([x])
    monkeypatch.setattr(on_cpu, "library", lambda: None)
    assert Fingerprints()([x]) == expected


def test_one_object_follows_its_tensors(generator) -> None:
    """In place, to other memory, to another dtype, to fewer of them."""
    fingerprints = Fingerprints()
    tensors = [torch.randn(40, 50, generator=generator) for _ in range(3)]
    for _ in range(2):
        assert fingerprints(tensors) == [fingerprint(x) for x in tensors]
        tensors[1].data.neg_()
    for changed in ([x.clone() for x in tensors], [x.bfloat16() for x in tensors], tensors[:1], []):
        assert fingerprints(changed) == [fingerprint(x) for x in changed]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_lowest_bit_of_any_sample_changes_it(dtype: torch.dtype, generator) -> None:
    x = random_bits((100, 100), dtype, generator)
    bits = x.view(-1).view(torch.int32 if dtype == torch.float32 else torch.int16)
    fingerprints, seen = Fingerprints(), set()
    for offset in sample_offsets(x.numel()).tolist():
        bits[offset] ^= 1
        seen.update(fingerprints([x]))
        bits[offset] ^= 1
    assert len(seen) == SAMPLES and not seen & set(fingerprints([x]))


def test_changes_that_add_up_to_nothing_change_it(generator) -> None:
    x = torch.randn(64, 64, generator=generator)
    all_signs, swapped = -x, x.clone()
    pair = sample_offsets(x.numel())[[3, 200]]
    swapped.view(-1)[pair] = x.view(-1)[pair.flip(0)]
    assert len(set(Fingerprints()([x, all_signs, swapped, x + 0.0]))) == 3


@pytest.mark.parametrize("rows, cols", [(1024, 1024), (4096, 4096), (3072, 768), (4096, 64), (64, 4096), (11008, 4096)])
def test_samples_are_spread_over_rows_and_columns(rows: int, cols: int) -> None:
    offsets = sample_offsets(rows * cols)
    assert offsets.unique().numel() == SAMPLES and 0 <= offsets.min() and offsets.max() < rows * cols
    for parts in (offsets // cols * PLACES // rows, offsets % cols * 4 // cols):
        assert parts.unique().numel() == parts.max() + 1 >= 4, "in each sixteenth of the rows, each quarter of a row"


def test_offsets_of_matrices_with_more_than_2_to_the_32_elements_are_in_them() -> None:
    numel = 262144 * 65536
    offsets = sample_offsets(numel)
    assert offsets.min() >= 0 and numel * 15 // 16 <= offsets.max() < numel
