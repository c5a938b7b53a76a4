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


def test_cached_weights_are_not_quantized_and_less_than_720_megabytes_are_moved_outside_gemms() -> None:
    cached = lower_swiglu("cached")
    assert cached.gemms == 9 and all(launch.fp8 for launch in cached.launches if launch.kind == "gemm")
    # Two updates of scales; norm, activation, a transposed copy; gradient, activation, norm and its weight.
    assert cached.triton_kernels == 9 and cached.bytes_outside_gemms <= 720e6
    assert refresh_megabytes("swiglu") * 1e6 == 3 * WIDTH * HIDDEN * 4
    assert refresh_megabytes("swiglu", 100) * 1e6 == 3 * WIDTH * HIDDEN * 3
