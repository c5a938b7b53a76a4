"""With cached weights the code generated for a GPU quantizes no weight, in forward or backward."""

from __future__ import annotations

from absent_gpu import absent_gpu
from count_launches import Step
from gpu_code import lower
from gpu_weight_cache import refresh_megabytes, variants
from saved_bytes import HIDDEN, WIDTH


def lower_swiglu(variant: str) -> Step:
    with absent_gpu(90) as gpu:
        return lower(gpu, "swiglu", **variants(90)[variant])


def test_cached_weights_are_not_quantized_and_a_residual_added_by_the_gemm_leaves_less_than_720_megabytes() -> None:
    cached, autotuned = lower_swiglu("cached"), lower_swiglu("autotuned")
    assert cached.gemms == autotuned.gemms == 9
    assert all(launch.fp8 for step in (cached, autotuned) for launch in step.launches if launch.kind == "gemm")
    # Two updates of scales; norm, activation, residual, a transposed copy; gradient, activation, norm and its weight.
    assert cached.triton_kernels == 10 and cached.bytes_outside_gemms <= 748e6
    assert autotuned.bytes_outside_gemms <= 720e6
    assert refresh_megabytes("swiglu") * 1e6 == 3 * WIDTH * HIDDEN * 4
