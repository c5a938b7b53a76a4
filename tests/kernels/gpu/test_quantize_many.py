"""quantize_many gives the reference's bytes in both layouts and the largest magnitude of each of many matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.formats import BY_DTYPE, E4M3, Format
from fp8_compile.kernels.gpu import quantize_many, tile
from fp8_compile.kernels.gpu.quantize_many import Matrix, QuantizeMany


def matrix(
    x: torch.Tensor, scale: float, format: Format = E4M3, via: torch.dtype | None = None, both: bool = True
) -> Matrix:
    rows, cols = x.shape
    q, q_t = torch.empty(rows, cols, dtype=format.dtype), torch.empty(cols, rows, dtype=format.dtype) if both else None
    return Matrix(x, q, q_t, torch.tensor([scale]), torch.tensor([tile.NOTHING]), via)


def check(matrices: list[Matrix]) -> QuantizeMany:
    with interpreted(quantize_many, tile):
        launches = QuantizeMany(matrices)
        launches()
    for one in matrices:
        for actual, expected in zip((one.q, one.q_t, one.amax[0]), quantize_many.reference(one)):
            if actual is not None:
                check_same(actual, expected)
    return launches


@pytest.mark.parametrize("format", list(BY_DTYPE.values()), ids=str)
def test_matrices_of_many_sizes_and_dtypes_take_one_launch_a_dtype(format: Format, generator) -> None:
    shapes = [(1, 1), (3, 65), (64, 64), (129, 67), (32, 160)]
    dtypes = (torch.float32, torch.bfloat16)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes for dtype in dtypes]
    launches = check([matrix(x, 7.0 + index, format) for index, x in enumerate(tensors)])
    assert len(launches.launches) == 4, "two dtypes, with and without sizes that are multiples of 16"


def test_autocasts_rounding_comes_before_the_cast_and_in_the_amax(generator) -> None:
    x = torch.randn(40, 48, generator=generator)
    for via in (torch.bfloat16, torch.float16):
        plain, rounded = matrix(x, 100.0), matrix(x, 100.0, via=via)
        check([plain, rounded])
        assert plain.amax != rounded.amax


def test_one_layout_alone_is_a_launch_of_its_own(generator) -> None:
    x = torch.randn(40, 48, generator=generator)
    launches = check([matrix(x, 9.0, both=both) for both in (False, True, False)])
    assert [len(launch.kept) for launch in launches.launches] == [2, 1]


def test_a_launch_stays_on_one_device_which_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the matrices of each: a GPU can't read another one's memory. Triton asks which device is current."""
    current: list[torch.device] = []
    launched: list[tuple[torch.device, ...]] = []

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda table, tiles, x, *rest, **constants: launched.append((x.device, table.device, *current))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(quantize_many, "quantize_many_kernel", Kernel())
    devices = [torch.device(name) for name in ("cpu", "meta", "cpu")]
    matrices = []
    for device in devices:
        with device:
            matrices.append(matrix(torch.zeros(4, 8), 1.0))
    QuantizeMany(matrices)()
    assert launched == [3 * (device,) for device in devices[:2]]


def test_inf_nan_zeros_and_an_empty_matrix_stay_with_their_own_matrix(generator) -> None:
    tensors = [torch.randn(70, 20, generator=generator) for _ in range(2)]
    tensors[0][69, 3], tensors[1][0, 0] = -torch.inf, torch.nan
    matrices = [matrix(x, 3.0) for x in (*tensors, torch.zeros(5, 5), torch.zeros(0, 4), tensors[0][:50])]
    check(matrices)
    assert [float(one.amax) for one in matrices[2:4]] == [0, 0]
    assert matrices[0].amax == torch.inf and matrices[1].amax.isnan() and matrices[4].amax.isfinite()


def test_a_matrix_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        QuantizeMany([matrix(torch.zeros(4, 6).t(), 1.0)])
