"""quantize_many gives the reference's bytes in both layouts and the largest magnitude of each of many matrices; when it
checks, only of those that have changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from interpreted import check_same, interpreted
from stub_driver import stub_driver

from fp8_compile.kernels.fingerprint import fingerprint
from fp8_compile.kernels.formats import BY_DTYPE, E4M3, Format
from fp8_compile.kernels.gpu import quantize_many, tile
from fp8_compile.kernels.gpu.quantize_many import Matrix, QuantizeMany, new_fingerprints


def matrix(
    x: torch.Tensor, scale: float, format: Format = E4M3, via: torch.dtype | None = None, both: bool = True
) -> Matrix:
    rows, cols = x.shape
    q, q_t = torch.empty(rows, cols, dtype=format.dtype), torch.empty(cols, rows, dtype=format.dtype) if both else None
    return Matrix(x, q, q_t, torch.tensor([scale]), torch.tensor([tile.NOTHING]), new_fingerprints(x), via)


def check(matrices: list[Matrix]) -> QuantizeMany:
    launches = QuantizeMany(matrices)
    launch(launches)
    for one in matrices:
        check_written(one)
    return launches


def launch(launches: QuantizeMany, **how: bool) -> None:
    with interpreted(quantize_many, tile):
        launches(**how)


def check_written(one: Matrix) -> None:
    for actual, expected in zip((one.q, one.q_t, one.amax[0]), quantize_many.reference(one)):
        if actual is not None:
            check_same(actual, expected)
    assert set(one.fingerprints.tolist()) == {fingerprint(one.x)}


MARK = 0x55


def mark(matrices: list[Matrix]) -> None:
    """Make it visible whether a matrix is quantized."""
    for one in matrices:
        one.q.view(torch.uint8).fill_(MARK)
        one.amax.fill_(tile.NOTHING)


def is_marked(one: Matrix) -> bool:
    return bool((one.q.view(torch.uint8) == MARK).all()) and one.amax.item() == tile.NOTHING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_check_quantizes_the_matrices_that_have_changed_and_no_others(dtype: torch.dtype, generator) -> None:
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in [(129, 67), (64, 128), (5, 3), (70, 20)]]
    matrices = [matrix(x, 7.0) for x in tensors]
    launches = check(matrices)
    for changed in ([], [0, 2], [1], [], [0, 1, 2, 3], [3]):  # launch after launch
        mark(matrices)
        for index in changed:
            tensors[index].data.mul_(0.5)
        launch(launches, check=True)
        for index, one in enumerate(matrices):
            if index in changed:
                check_written(one)
            else:
                assert is_marked(one)


def test_weights_that_are_put_back_are_found_as_well(generator) -> None:
    """A fingerprint that was compared with is replaced where it differs, and stays where it does not."""
    weight, average = torch.randn(2, 80, 96, generator=generator)
    one = matrix(weight.clone(), 7.0)
    launches = check([one])
    for now in (average, average, weight, weight, average):
        same = torch.equal(one.x, now)
        one.x.copy_(now)
        mark([one])
        launch(launches, check=True)
        assert is_marked(one) == same
        if not same:
            check_written(one)


def test_without_a_check_everything_is_quantized_whatever_its_fingerprint(generator) -> None:
    matrices = [matrix(torch.randn(70, 20, generator=generator), 7.0)]
    launches = check(matrices)
    mark(matrices)
    launch(launches)
    check_written(matrices[0])


def test_amaxes_are_left_alone_where_they_are_not_to_be_recorded(generator) -> None:
    one = matrix(torch.randn(70, 20, generator=generator), 7.0)
    launch(QuantizeMany([one]), record=False)
    assert one.amax == tile.NOTHING
    check_same(one.q, quantize_many.reference(one)[0])


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


@pytest.mark.parametrize("how", [{}, {"check": True}, {"record": False}], ids=str)
def test_a_launch_is_prepared_once_and_gives_the_kernel_the_same_arguments_each_time(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, bool]
) -> None:
    matrices = [matrix(torch.zeros(64, 128), 1.0) for _ in range(3)]
    many, kernel = QuantizeMany(matrices), quantize_many.quantize_many_kernel
    with stub_driver(kernel) as launched:
        many(**how)
        monkeypatch.setattr(type(kernel), "run", None)  # Triton's own way: another time would fail
        many(**how)
    first, second = launched
    assert first.kernel == second.kernel == "quantize_many_kernel" and first.grid == second.grid == (6, 1, 1)
    assert all(one is other or one == other for one, other in zip(first.arguments, second.arguments, strict=True))
    given = dict(zip(kernel.arg_names, first.arguments, strict=True))
    assert given["x_like_ptr"] is matrices[0].x and given["q_like_ptr"] is matrices[0].q and given["matrices"] == 3
    wanted = {"check": False, "record": True, **how}
    assert (given["CHECK"], given["RECORD"], given["BOTH"]) == (wanted["check"], wanted["record"], True)
    assert (given["STEPS"], given["LARGEST"], given["ALIGNED"], given["VIA"]) == (2, 448.0, True, 0)
    blocks = {name: given[name] for name in ("BLOCK_R", "BLOCK_C", "PLACES", "WIDTH")}
    assert blocks == {name: getattr(quantize_many, name) for name in blocks}


def test_inf_nan_zeros_and_an_empty_matrix_stay_with_their_own_matrix(generator) -> None:
    tensors = [torch.randn(70, 20, generator=generator) for _ in range(2)]
    tensors[0][69, 3], tensors[1][0, 0] = -torch.inf, torch.nan
    matrices = [matrix(x, 3.0) for x in (*tensors, torch.zeros(5, 5), torch.zeros(0, 4), tensors[0][:50])]
    check(matrices)
    assert [float(one.amax) for one in matrices[2:4]] == [0, 0]
    assert matrices[0].amax == torch.inf and matrices[1].amax.isnan() and matrices[4].amax.isfinite()


def test_nan_in_one_tile_wins_over_inf_in_another(generator) -> None:
    x = torch.randn(70, 80, generator=generator)
    x[3, 70] = -torch.inf
    one, other = matrix(x.clone(), 20.0), matrix(x, 20.0)
    x[69, 0] = torch.nan
    check([one, other])
    assert one.amax == torch.inf and other.amax.isnan()


def test_a_larger_amax_that_was_recorded_before_stays_and_a_smaller_one_goes() -> None:
    matrices = [matrix(torch.tensor([[-3.0, 2.0]]), 20.0) for _ in range(3)]
    for one, before in zip(matrices, (5.0, 1.0, torch.nan)):
        one.amax.fill_(before)
    launch(QuantizeMany(matrices))
    assert matrices[0].amax == 5.0 and matrices[1].amax == 3.0 and matrices[2].amax.isnan()


@pytest.mark.parametrize("format", list(BY_DTYPE.values()), ids=str)
def test_any_scale_gives_what_the_reference_gives(format: Format) -> None:
    """Values beyond the largest saturate, tiny ones keep their sign, a NaN of the scale reaches every element."""
    x = torch.tensor([[0.0, -0.0, 1e-45, -1e-40, 1e-30, -1e-12, 1.0, -1.0, 1e30, -3e38]])
    check([matrix(x, scale, format) for scale in (0.0, 1e-38, 1.0, 1e10, 1e30, torch.inf, torch.nan)])


def test_a_matrix_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        QuantizeMany([matrix(torch.zeros(4, 6).t(), 1.0)])
