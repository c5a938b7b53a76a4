"""A step lowered for an absent GPU is counted launch by launch, and nothing of that GPU is left afterwards."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
import triton
import triton.language as tl
from absent_gpu import absent_gpu
from torch import nn
from torch._dynamo import device_interface
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CacheBase
from torch._inductor.utils import get_gpu_type, run_and_get_code
from torch.utils._triton import has_triton

ROWS, INNER, OUTER = 32, 64, 48
BF16 = 2  # bytes
HAS_GPU = torch.cuda.is_available()


def rows() -> tuple[torch.Tensor]:
    return (torch.empty(ROWS, INNER, dtype=torch.bfloat16, requires_grad=True),)


def linear() -> nn.Module:
    return nn.Linear(INNER, OUTER, bias=False).bfloat16()


def lowered(make_model: Callable[[], nn.Module], make_inputs: Callable[[], Any] = rows, **arguments: Any):
    with absent_gpu(90) as gpu:
        return gpu.training_step(make_model, make_inputs, **arguments)


def facts() -> dict[str, Any]:
    """What the process knows of its GPUs."""
    interface = device_interface.CudaInterface
    return {
        "torch.cuda": dict(vars(torch.cuda)),
        "interface": dict(vars(interface)),
        "worker": dict(vars(interface.Worker)),
        "interfaces": dict(device_interface.device_interfaces),
        "cuda": torch.version.cuda,
        "driver": triton.runtime.driver._active,
        "has_triton": has_triton(),
        "gpu_type": get_gpu_type(),
        "cache key": CacheBase.get_system(),
    }


def compile_on_cpu() -> tuple[torch.Tensor, list[str]]:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.t(), -1) @ nn.functional.gelu(x)

    torch._dynamo.reset()
    x = torch.linspace(-1, 1, 256).reshape(16, 16)
    with inductor_config.patch(fx_graph_cache=False):
        return run_and_get_code(torch.compile(attend), x)


def test_inside_there_is_the_gpu_that_was_asked_for() -> None:
    for capability in (90, 100, 120):
        with absent_gpu(capability):
            assert torch.cuda.is_available() and has_triton()
            assert torch.cuda.get_device_capability() == divmod(capability, 10)
            assert triton.runtime.driver.active.get_current_target().arch == capability


def test_afterwards_nothing_knows_of_a_gpu() -> None:
    compile_on_cpu()  # fills what is filled once
    before = facts()
    step = lowered(linear, backend="fp8", options={"target": "cuda:90"})
    assert "cuda:0" in step.forward
    assert torch.cuda.is_available() == has_triton() == HAS_GPU
    assert facts() == before


def test_a_cpu_compile_gives_the_same_code_before_and_after() -> None:
    expected, code = compile_on_cpu()
    lowered(linear)
    result, code_after = compile_on_cpu()
    assert torch.equal(result, expected)
    assert [without_paths(text) for text in code_after] == [without_paths(text) for text in code]
    assert "cpp_fused" in code[0]


def without_paths(code: str) -> str:
    return re.sub(r"^# AOT ID.*|/\S+", "", code, flags=re.MULTILINE)


def test_an_error_inside_leaves_nothing_either() -> None:
    before = facts()

    def fail(model: nn.Module) -> nn.Module:
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        lowered(linear, convert=fail)
    assert facts() == before


def test_gemms_of_a_linear_are_counted_exactly() -> None:
    step = lowered(linear)
    x, w, y = ROWS * INNER, OUTER * INNER, ROWS * OUTER
    assert [launch.bytes for launch in step.launches if launch.kind == "gemm"] == 3 * [(x + w + y) * BF16]
    assert [launch.flops for launch in step.launches if launch.kind == "gemm"] == 3 * [2 * ROWS * OUTER * INNER]
    assert not any(launch.fp8 for launch in step.launches)
    assert step.bytes == step.gemm_bytes + step.bytes_outside_gemms


def test_gemms_of_fp8_operands_read_a_byte_an_element() -> None:
    step = lowered(linear, backend="fp8", options={"recipe": "tensorwise", "target": "cuda:90"})
    gemms = [launch for launch in step.launches if launch.kind == "gemm"]
    scales = 2 * 4
    assert len(gemms) == 3 and all(launch.fp8 for launch in gemms)
    assert gemms[0].bytes == ROWS * INNER + OUTER * INNER + ROWS * OUTER * BF16 + scales


class Activation(nn.Module):
    """relu(x) * 2, one kernel forward and one backward; a mask of one byte an element is saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x) * 2


def test_a_fused_kernel_reads_and_writes_each_buffer_once() -> None:
    step = lowered(Activation)
    assert step.triton_kernels == len(step.launches) == 2
    x, y, mask = ROWS * INNER * BF16, ROWS * INNER * BF16, ROWS * INNER
    assert [launch.bytes for launch in step.launches] == 2 * [x + y + mask]
    assert step.launches[0].name in step.forward and step.launches[1].name in step.backward


@triton.jit
def double_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """y = 2 * x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 2 * tl.load(x_ptr + i))


class Doubled(nn.Module):
    """x plus what a kernel of the user's makes of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fixed = x.detach()
        y = torch.empty_like(fixed)
        double_kernel[(ROWS,)](fixed, y, BLOCK=INNER)
        return x * y


def test_a_buffer_that_a_kernel_of_the_users_fills_is_counted_once() -> None:
    step = lowered(Doubled)
    (launch,) = [launch for launch in step.launches if launch.name.startswith("double_kernel")]
    assert launch.kind == "triton"
    assert launch.bytes == 2 * ROWS * INNER * BF16


class Attend(nn.Module):
    """Causal attention of a tensor with itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_results_of_an_extern_call_are_no_launches_and_causal_attention_is_half() -> None:
    batch, heads, time, size = 2, 3, 64, 16
    step = lowered(Attend, lambda: (torch.empty(batch, heads, time, size, dtype=torch.bfloat16, requires_grad=True),))
    launched = sum(len(re.findall(r"^ *\w+\.run\(", code, re.MULTILINE)) for code in (step.forward, step.backward))
    assert (step.others, step.gemms, step.triton_kernels) == (2, 0, launched)
    product = 2 * batch * heads * time * time * size
    flops = [launch.flops for launch in step.launches if launch.kind == "other"]
    assert flops == [2 * product // 2, 5 * product // 2]


class Broken(nn.Module):
    """Two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        torch._dynamo.graph_break()
        return y * 2


def test_a_graph_break_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="graph breaks"):
        lowered(Broken)
