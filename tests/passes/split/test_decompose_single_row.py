"""Products and attention of one row become plain ops with the same numbers, in loops that read the row from memory."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fp8_compile
from fp8_compile.passes.split.decompose_single_row import DecomposeSingleRow

aten = torch.ops.aten
flash = aten._scaled_dot_product_flash_attention_for_cpu
BATCH, HEADS, KEYS, WIDTH = 2, 4, 37, 24
INF, NAN = float("inf"), float("nan")
SEEN = torch.arange(KEYS).view(1, 1, 1, KEYS) < torch.tensor([30, 0]).view(BATCH, 1, 1, 1)  # the second sees nothing
BIASES = torch.randn(1, HEADS, 1, KEYS, generator=torch.Generator().manual_seed(0))


def opened(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, int]:
    """The graph of a function after the pass, and how many places it changed."""
    made = make_fx(function, tracing_mode="fake")(*inputs)
    changes = DecomposeSingleRow().run(made.graph).changes
    made.graph.eliminate_dead_code()
    made.graph.lint()
    made.recompile()
    return made, changes


def targets(made: fx.GraphModule) -> set[Any]:
    return {node.target for node in made.graph.nodes}


def error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("mask", [None, SEEN, BIASES], ids=["none", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_of_one_query_is_as_exact_as_the_op_it_replaces(
    dtype: torch.dtype, mask: Tensor | None, groups: int
) -> None:
    torch.manual_seed(0)
    query = torch.randn(BATCH, HEADS, 1, WIDTH).to(dtype)
    key, value = (torch.randn(BATCH, KEYS, groups, WIDTH).to(dtype).transpose(1, 2) for _ in range(2))
    mask = mask.to(dtype) if mask is BIASES else mask
    repeated = [side.double().repeat_interleave(HEADS // groups, 1) for side in (key, value)]
    blocked = torch.where(SEEN, 0.0, -INF).to(dtype) if mask is SEEN else mask
    wide = None if blocked is None else blocked.double()
    exact = F.scaled_dot_product_attention(query.double(), *repeated, attn_mask=wide, scale=0.3)

    masks = () if mask is None else (blocked,)

    def attend(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor) -> Tensor:
        return flash(query, key, value, attn_mask=masks[0] if masks else None, scale=0.3)[0]

    made, changes = opened(attend, query, key, value, *masks)
    assert changes == 1 and flash.default not in targets(made)
    actual = made(query, key, value, *masks)
    assert actual.dtype == dtype and actual.shape == exact.shape
    assert error(actual, exact) <= 2 * error(attend(query, *(side.to(dtype) for side in repeated), *masks), exact)
    if mask is SEEN:
        assert exact[1].abs().max() == 0 and actual[1].abs().max() == 0


def test_non_finite_keys_and_values_reach_the_result() -> None:
    made, _ = opened(lambda q, k, v: flash(q, k, v)[0], *(torch.rand(1, 1, size, 16) for size in (1, 5, 5)))
    for poison in (INF, NAN):
        for place in (1, 2):
            tensors = [torch.rand(1, 1, size, 16) for size in (1, 5, 5)]
            tensors[place][0, 0, 3, 2] = poison
            assert not made(*tensors).isfinite().all(), (poison, place)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_of_one_row_is_rounded_once(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    row, weight, added = (torch.randn(shape).to(dtype) for shape in ((1, 200), (70, 200), (70,)))

    def multiply(row: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        return aten.addmm(added, row, weight.t()) if bias else aten.mm(row, weight.t())

    made, changes = opened(multiply, row, weight, added)
    assert changes == 1 and not {aten.mm.default, aten.addmm.default} & targets(made)
    exact = row.double() @ weight.double().t() + (added.double() if bias else 0)
    assert made(row, weight, added).shape == (1, 70)
    torch.testing.assert_close(made(row, weight, added).double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-4)
    weight[7, 9] = NAN
    assert made(row, weight, added).isnan().nonzero().tolist() == [[0, 7]]


def test_what_is_not_one_row_along_k_is_left_alone() -> None:
    half = torch.randn(1, 32).bfloat16()
    weight, queries = torch.randn(48, 32).bfloat16(), torch.randn(1, 2, 2, 16)
    keys = torch.randn(1, 2, 8, 16)
    left = {
        "two rows": (lambda x, w: aten.mm(x, w.t()), half.repeat(2, 1), weight),
        "fp16": (lambda x, w: aten.mm(x, w.t()), half.half(), weight.half()),
        "along N": (aten.mm, half, weight.t().contiguous()),
        "half of the bias": (lambda b, x, w: aten.addmm(b, x, w.t(), beta=0.5), weight[:, 0], half, weight),
        "two queries": (lambda q, k: flash(q, k, k)[0], queries, keys),
        "causal": (lambda q, k: flash(q, k, k, 0.0, True)[0], queries[:, :, :1], keys),
        "logsumexp": (lambda q, k: flash(q, k, k)[1], queries[:, :, :1], keys),
    }
    for name, (function, *inputs) in left.items():
        assert opened(function, *inputs)[1] == 0, name  # type: ignore[arg-type]


class Step(nn.Module):
    """One token of a decoder: a packed layer, a cache of keys, a head that is not packed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.head = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 160)
        self.register_buffer("keys", torch.randn(1, 2, KEYS, 32))

    def forward(self, x: Tensor) -> Tensor:
        query = torch.tanh(self.query(x)).view(1, 1, 2, 32).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, self.keys, self.keys)
        return self.head(self.norm(attended.transpose(1, 2).reshape(1, 64)))


def test_a_decoded_token_computes_its_rows_once_and_calls_no_library_for_them() -> None:
    torch.manual_seed(0)
    model = Step().bfloat16().eval().requires_grad_(False)
    fp8_compile.pack(model, include=("query",), progress=False)
    x = torch.randn(1, 64).bfloat16()
    actual, (code,) = run_and_get_code(torch.compile(model, backend="fp8"), x)
    assert "nvfp4_mm" in code and "flash_attention" not in code and "extern_kernels." not in code
    for computed in (".tanh()", "std::sqrt"):  # the query's and the norm's: in no loop that reads keys or weights
        assert code.count(computed) == 1, computed
    exact = model.float()(x.float()).double()
    assert error(actual, exact) < 0.01
