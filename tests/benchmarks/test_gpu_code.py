"""The code generated for a GPU moves fewer bytes than torchao's, in fewer kernels, and all of it compiles."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import gpu_code
import pytest
import torchao_peers
from absent_gpu import absent_gpu
from compile_kernels import compile_kernels, kernel_sources
from count_launches import Launch, Step
from torch import fx, nn

from fp8_compile.config import RECIPES
from fp8_compile.passes.split.relayout_bytes import RelayoutBytes


def lower(capability: int, variant: str, block: str = "swiglu") -> Step:
    arguments = gpu_code.variants(capability, list(RECIPES))[variant]
    with absent_gpu(capability) as gpu:
        return gpu_code.lower(gpu, block, **arguments)


@pytest.fixture(scope="session")
def torchao_90() -> Step:
    return lower(90, "torchao tensorwise")


@pytest.fixture(scope="session")
def delayed_90() -> Step:
    return lower(90, "fp8 delayed")


@pytest.fixture(scope="session")
def delayed_100() -> Step:
    return lower(100, "fp8 delayed")


def test_delayed_moves_at_most_63_percent_of_torchaos_bytes_outside_the_gemms(delayed_90, torchao_90) -> None:
    assert torchao_90.gemms == delayed_90.gemms == 9
    assert delayed_90.bytes_outside_gemms <= 0.63 * torchao_90.bytes_outside_gemms


def test_delayed_launches_at_most_half_of_torchaos_kernels(delayed_90, torchao_90) -> None:
    assert delayed_90.triton_kernels <= torchao_90.triton_kernels // 2


def test_every_gemm_of_the_delayed_step_is_fp8(delayed_90) -> None:
    assert all(launch.fp8 for launch in delayed_90.launches if launch.kind == "gemm")


def test_the_kernels_found_in_the_sources_are_those_launched(delayed_90) -> None:
    found = [*kernel_sources(delayed_90.forward), *kernel_sources(delayed_90.backward)]
    assert sorted(found) == sorted(launch.name for launch in delayed_90.launches if launch.kind == "triton")


@pytest.mark.parametrize("direction, fp8", [("forward", "'*fp8e4nv'"), ("backward", "'*fp8e5'")])
def test_every_kernel_compiles_for_an_h100_in_every_configuration_without_spills(delayed_90, direction, fp8) -> None:
    source = getattr(delayed_90, direction)
    assert fp8 in source and "tl.atomic_max(" in source  # what is hard to compile is there
    compiled = list(compile_kernels(source))
    assert {kernel.name for kernel in compiled} == set(kernel_sources(source))
    assert all(kernel.cubin_bytes > 0 and 0 < kernel.registers < 255 for kernel in compiled)
    assert [(kernel.name, kernel.config, kernel.spills) for kernel in compiled if kernel.spills] == []
    assert [(kernel.name, kernel.nan_clamps) for kernel in compiled if kernel.nan_clamps] == []


def test_a_b200_gets_every_tensor_once(delayed_100, torchao_90) -> None:
    assert delayed_100.gemms == 9 and all(launch.fp8 for launch in delayed_100.launches if launch.kind == "gemm")
    assert delayed_100.triton_kernels <= 11 and delayed_100.bytes_outside_gemms <= 0.49 * torchao_90.bytes_outside_gemms


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_kernel_compiles_for_a_b200_without_spills(delayed_100, direction) -> None:
    source = getattr(delayed_100, direction)
    compiled = list(compile_kernels(source, every_config=False))
    assert [kernel.name for kernel in compiled] == list(kernel_sources(source))
    assert all(kernel.cubin_bytes > 0 for kernel in compiled)
    assert [(kernel.name, kernel.config, kernel.spills) for kernel in compiled if kernel.spills] == []
    assert [(kernel.name, kernel.nan_clamps) for kernel in compiled if kernel.nan_clamps] == []


@pytest.mark.parametrize(
    "capability, recipe, ratio, kernels, ours",
    [
        (90, "blockwise", 0.78, 12, {"quantize_blocks_kernel": 5}),  # and the norm's output
        (100, "rowwise", 0.87, 22, {"row_column_amax_kernel": 4, "cast_rows_columns_kernel": 4}),
    ],
)
def test_many_scales_read_weights_and_the_gradient_once_and_every_kernel_compiles(
    torchao_90, capability: int, recipe: str, ratio: float, kernels: int, ours: dict[str, int]
) -> None:
    step = lower(capability, f"fp8 {recipe}")
    assert step.bytes_outside_gemms <= ratio * torchao_90.bytes_outside_gemms and step.triton_kernels <= kernels
    names = [launch.name for launch in step.launches]
    assert {one: sum(name.startswith(one) for name in names) for one in ours} == ours  # three weights and one gradient
    for source in (step.forward, step.backward):
        compiled = list(compile_kernels(source, every_config=False))
        assert [kernel.name for kernel in compiled] == list(kernel_sources(source))
        assert all(kernel.cubin_bytes > 0 and kernel.spills == 0 for kernel in compiled)


def test_biases_cost_no_second_read_of_their_gradients() -> None:
    step, torchao = (lower(90, variant, "gelu") for variant in ("fp8 delayed", "torchao tensorwise"))
    assert step.bytes_outside_gemms <= 0.53 * torchao.bytes_outside_gemms
    assert step.triton_kernels <= torchao.triton_kernels // 2
    kernels = {name: text for name, text in kernel_sources(step.backward).items() if "keep_dims=True" in text}
    assert len(kernels) == 2  # a quantize each
    compiled = [kernel for kernel in compile_kernels(step.backward, every_config=False) if kernel.name in kernels]
    assert all(kernel.cubin_bytes > 0 and kernel.spills == 0 for kernel in compiled)


def test_code_that_is_not_triton_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cpp_fused_0"):
        kernel_sources("cpp_fused_0 = async_compile.cpp_pybinding(['float*'], '''...''')")


MACHINE = gpu_code.Machine("test", "cuda:90", bandwidth=1e12, fp8=2e15, bf16=1e15)


@pytest.mark.parametrize(
    "launch, seconds",
    [
        (Launch("pointwise", "triton", bytes=10**9), 1e-3),
        (Launch("mm", "gemm", bytes=10**6, flops=10**12), 1e-3),
        (Launch("_scaled_mm", "gemm", bytes=10**6, flops=10**12, fp8=True), 0.5e-3),
        (Launch("_scaled_mm", "gemm", bytes=10**9, flops=10**12, fp8=True), 1e-3),  # waits for memory
    ],
)
def test_the_estimate_is_the_longer_of_memory_and_arithmetic_plus_a_launch(launch: Launch, seconds: float) -> None:
    assert gpu_code.estimated_seconds(Step((launch, launch), "", ""), MACHINE) == pytest.approx(2 * (seconds + 3e-6))


def test_mxfp8_is_lowered_for_blackwells_and_estimated_for_them_alone() -> None:
    assert "fp8 mxfp8" in gpu_code.variants(100, ["mxfp8"])
    assert "fp8 mxfp8" not in gpu_code.variants(90, ["mxfp8"])
    step = Step((Launch("mm", "gemm", 10**6, 10**9),), "", "")
    assert gpu_code.estimates(step, "mxfp8") == {"H100": None, "B200": pytest.approx(0.003, abs=5e-4)}
    assert None not in gpu_code.estimates(step, "delayed").values()


def made_up(gpu: Any, block: str, **arguments: Any) -> Step:
    """Half of torchao's bytes for what is not torchao's."""
    size = 2 * 10**6 if "convert" in arguments else 10**6
    return Step((Launch("pointwise", "triton", size), Launch("mm", "gemm", 10**6, 10**9)), "", "")


def test_the_table_compares_with_torchao_tensorwise(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_code, "lower", made_up)
    monkeypatch.setattr(sys, "argv", ["gpu_code.py", "--cc", "100", "--blocks", "gqa", "--recipes", "delayed", "mxfp8"])
    gpu_code.main()
    lines = capsys.readouterr().out.splitlines()
    assert "a model, not a measurement" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == 6 * ["gqa"]
    assert lines[3].split()[1:8] == ["torchao", "tensorwise", "1", "1", "0", "2.0", "1.00"]
    (delayed,) = (line for line in lines if "fp8 delayed" in line)
    (mxfp8,) = (line for line in lines if "fp8 mxfp8" in line)
    assert delayed.split()[1:8] == ["fp8", "delayed", "1", "1", "0", "1.0", "0.50"]
    assert mxfp8.split()[7:10] == ["0.50", "0.50", "-"]  # to tensorwise, to torchao's MXFP8; no H100 has it


def test_json_has_the_rows_of_the_table(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_code, "lower", made_up)
    monkeypatch.setattr(sys, "argv", ["gpu_code.py", "--cc", "100", "--blocks", "gelu", "--json"])
    gpu_code.main()
    table = json.loads(capsys.readouterr().out)
    recipes = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
    assert [row["variant"] for row in table][4:] == [f"fp8 {recipe}" for recipe in recipes]
    assert [row["ratio"] for row in table] == [1.0, 1.0, 1.0, 0.5, *6 * [0.5]]
    assert [row["ratio_to_mxfp8"] for row in table] == [None, None, 1.0, 0.5, *6 * [0.5]]


def test_torchaos_mxfp8_is_refused_where_it_was_imported_without_a_gpu() -> None:
    importlib.import_module(torchao_peers.KERNELS)
    with pytest.raises(RuntimeError, match="no kernels in this process. Ask for it in a process of its own"):
        torchao_peers.mxfp8(nn.Linear(32, 32))


def test_a_pass_can_be_left_out_by_its_name() -> None:
    run = RelayoutBytes.run
    with gpu_code.without(["RelayoutBytes"]):
        assert RelayoutBytes().run(fx.Graph()).changes == 0 and RelayoutBytes.run is not run
    assert RelayoutBytes.run is run
    with pytest.raises(ValueError, match="unknown passes RelayoutBites; there are AddInGemm, "):
        with gpu_code.without(["RelayoutBites"]):
            pass
