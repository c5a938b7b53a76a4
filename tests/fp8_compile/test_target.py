"""Which device can do what."""

from __future__ import annotations

import pytest
import torch

from fp8_compile import Target
from fp8_compile.cli import machine
from fp8_compile.torch_internals import autograd


@pytest.mark.parametrize("name", ["cpu", "cuda:89", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950"])
def test_a_target_prints_as_it_was_written(name: str) -> None:
    assert str(Target.parse(name)) == name
    assert Target.parse(name) == Target.parse(name), "targets of one name are equal, so configs with them are"


UNKNOWN = ["cuda", "cuda:", "cuda:h100", "CPU", "tpu", "hip:gfx90a", "hip:gfx9420", "", None, 90]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_target_is_an_error_that_lists_what_there_is(name: object) -> None:
    with pytest.raises(ValueError, match=r"target=.*expected 'cpu'.*'cuda:90'.*'hip:gfx942'"):
        Target.parse(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cuda:70", "cuda:80", "cuda:86"])
def test_a_gpu_without_fp8_is_an_error_that_says_which_has_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*89"):
        Target.parse(name)


def test_the_cpu_multiplies_any_shape_and_any_pair_of_formats() -> None:
    cpu = Target.of_device(torch.device("cpu"))
    assert cpu.is_cpu and cpu.alignment == 1 and cpu.e5m2_by_e5m2 and not cpu.needs_k_contiguous
    assert cpu.rowwise_output is None


def test_gpus_want_multiples_of_16_and_the_contraction_contiguous() -> None:
    for name in ("cuda:90", "cuda:100", "hip:gfx942"):
        target = Target.parse(name)
        assert not target.is_cpu and target.alignment == 16 and target.needs_k_contiguous
        assert not target.e5m2_by_e5m2 and target.rowwise_output == torch.bfloat16


def test_hopper_and_newer_and_the_cpu_have_blockwise_gemms() -> None:
    names = ("cpu", "cuda:89", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950")
    able = [name for name in names if "blockwise" in Target.parse(name).recipes]
    assert able == ["cpu", "cuda:90", "cuda:100", "cuda:120"]
    assert all({"tensorwise", "rowwise"} <= Target.parse(name).recipes for name in names)


def test_only_data_centre_blackwells_read_any_layout() -> None:
    """cuBLASLt wants K contiguous on Ada, Hopper and the Blackwells of workstations (12.x)."""
    names = ("cuda:89", "cuda:90", "cuda:100", "cuda:103", "cuda:120", "hip:gfx950", "cpu")
    assert [name for name in names if Target.parse(name).reads_any_layout] == ["cuda:100", "cuda:103"]


def test_mi300_has_formats_of_its_own() -> None:
    assert Target.parse("hip:gfx942").format("e4m3").dtype == torch.float8_e4m3fnuz
    assert Target.parse("hip:gfx942").format("e5m2").dtype == torch.float8_e5m2fnuz
    assert Target.parse("hip:gfx950").format("e4m3").dtype == torch.float8_e4m3fn
    assert Target.parse("cuda:90").format("e5m2").dtype == torch.float8_e5m2


def test_a_device_without_fp8_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="'meta' has no FP8 matmul.*set target="):
        Target.of_device(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error_whether_or_not_torch_is_built_for_one() -> None:
    with pytest.raises(ValueError, match="'cuda' is not on this machine; set target='cuda:90'"):
        Target.of_device(torch.device("cuda", 0))
    assert autograd.accelerator() == "cpu"
    assert machine.gpu().status == "note" and machine.gpu().found == "none"
