"""Outputs and every gradient of compiled models against FP64, within twice the error of an independent FP8 reference.

The graphs are interpreted (``UncompiledBackend``) except in the last section: the numbers are decided by the graph.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Callable

import fp8_reference as reference
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fp8_reference import LinearLayer, Noise
from torch import nn
from uncompiled import CODE_ANEW, NO_CACHE, UncompiledBackend, compile_uncompiled

from fp8_compile import Backend, Config
from fp8_compile.backend.explain import run_uncompiled
from fp8_compile.backend.graph import compile_graph

RECIPES = ["tensorwise", "rowwise", "blockwise"]
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
Results = dict[str, np.ndarray]


def assert_all_rewritten(backend: Any, matmuls: int | None = None) -> None:
    """A skipped matmul has no FP8 error: a budget would hold for the wrong reason."""
    rows = [row for report in backend.reports for row in report.rows]
    assert rows and all(row.rewritten for row in rows), backend.reports[0]
    assert matmuls is None or len(rows) == matmuls


# One layer: the three gemms are the reference's, to the roundoff of an FP32 sum.


@dataclasses.dataclass(frozen=True)
class Case:
    target: str
    recipe: str
    tokens: int
    shape: tuple[int, int]  # in, out
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.target}-{self.recipe}-{self.tokens}x{self.shape[0]}x{self.shape[1]}-{str(self.dtype)[6:]}"

    @property
    def written_in(self) -> torch.dtype | None:
        """GPUs write rowwise products in bf16 only."""
        return torch.bfloat16 if self.target != "cpu" and self.recipe != "tensorwise" else None

    def layer(self, sum_in: type) -> LinearLayer:
        recipe = reference.recipe(self.recipe, fnuz=self.target == "hip:gfx942")
        if sum_in is np.float64:
            return LinearLayer(recipe)
        return LinearLayer(recipe, sum_in, self.written_in)


ODD = (75, 87)  # for a GPU these are padded to 80 and 96
CASES = [
    *(Case("cpu", recipe, 21, ODD) for recipe in RECIPES),
    *(Case("cpu", recipe, 133, (150, 139)) for recipe in RECIPES),  # tiles of 128, whole and ragged, in all three gemms
    *(Case("cpu", recipe, 5, (33, 17), torch.bfloat16) for recipe in ("tensorwise", "rowwise")),
    Case("cpu", "blockwise", 5, (33, 17), torch.float16),
    *(Case("cuda:90", recipe, 21, ODD) for recipe in ("tensorwise", "rowwise")),
    *(Case("cuda:90", recipe, 16, (32, 48), torch.bfloat16) for recipe in ("tensorwise", "rowwise")),
    *(Case("hip:gfx942", recipe, 21, ODD) for recipe in ("tensorwise", "rowwise")),
]


def one_layer(case: Case) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer and data whose rows and columns differ in size, so that a scale given to the wrong one shows."""
    model = nn.Linear(*case.shape)
    x, dy = torch.randn(case.tokens, case.shape[0]), torch.randn(case.tokens, case.shape[1])
    for matrix in (model.weight.data, x, dy):
        for dim in (0, 1):
            sizes = [1, 1]
            sizes[dim] = matrix.shape[dim]
            matrix *= 2.0 ** torch.randint(-3, 4, sizes)
    return model.to(case.dtype), x.to(case.dtype), dy.to(case.dtype)


def fp8_exactly(case: Case, model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[Results, Noise]:
    """The layer with FP8 operands and FP64 sums, and how far an FP32 gemm of the dequantized operands is from it."""
    exact = reference.results(
        reference.reference_model(copy.deepcopy(model).double(), case.layer(np.float64)), x.double(), dy.double()
    )
    in_fp32 = reference.results(reference.reference_model(model, case.layer(np.float32)), x, dy)
    return exact, Noise(in_fp32, exact)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("without_onednn")
def test_three_gemms_of_a_layer_are_the_references_to_the_roundoff_of_the_sum(case: Case) -> None:
    model, x, dy = one_layer(case)
    compiled, backend = compile_uncompiled(model, case.recipe, target=case.target)
    found = reference.results(compiled, x, dy)
    assert_all_rewritten(backend, 3)
    exact, roundoff = fp8_exactly(case, model, x, dy)
    Noise(found, exact).check(roundoff)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_graph_for_a_gpu_gives_the_cpus_numbers_up_to_summation_order_and_output_rounding(recipe: str) -> None:
    case = Case("cuda:90", recipe, 21, ODD)
    model, x, dy = one_layer(case)
    on_gpu = reference.results(compile_uncompiled(model, recipe, target="cuda:90")[0], x, dy)
    torch._dynamo.reset()
    on_cpu = reference.results(compile_uncompiled(model, recipe, target="cpu")[0], x, dy)
    Noise(on_gpu, on_cpu).check(fp8_exactly(case, model, x, dy)[1])


def scaled_mm_of_tiles(left, right, scale_left, scale_right, bias=None, out_dtype=None, use_fast_accum=False):
    """``aten._scaled_mm`` with the block scales that only a GPU's has: each element times its scale, in FP64."""
    for q, name in ((left, "left"), (right, "right")):
        assert all(size % 16 == 0 for size in (q.shape if name == "right" else q.shape[1:])), f"{name}: {q.shape}"
    a, b = (_dequantized(q, scale) for q, scale in ((left, scale_left), (right, scale_right)))
    y = a @ b if bias is None else a @ b + bias
    return y.to(out_dtype)


def _dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    assert all(count in (size, -(-size // 128)) for count, size in zip(scale.shape, q.shape)), (scale.shape, q.shape)
    block_of = [torch.arange(size) // (1 if count == size else 128) for count, size in zip(scale.shape, q.shape)]
    return q.double() * scale[block_of[0]][:, block_of[1]]


def test_blockwise_graph_for_a_gpu_gives_the_references_numbers_where_a_gemm_knows_tiles() -> None:
    def run_with_tiles(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default):
            node.target = scaled_mm_of_tiles
        gm.recompile()
        return run_uncompiled(gm, example_inputs)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        config = Config(recipe="blockwise", target="cuda:90", inductor=NO_CACHE)
        compiled, report = compile_graph(gm, example_inputs, config, inner_compile=run_with_tiles)
        assert len(report.rewritten) == 3, report
        return compiled

    case = Case("cuda:90", "blockwise", 21, (250, 240))  # both padded to 256, and the tokens to 128
    model, x, dy = one_layer(case)
    exact, roundoff = fp8_exactly(case, model, x, dy)
    Noise(reference.results(torch.compile(model, backend=backend, fullgraph=True), x, dy), exact).check(roundoff)


# Models: within twice the error of the same model with the reference's layers.


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Tied(nn.Module):
    """One layer twice: its gradient is the sum of two gemms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def gelu_mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "a stack of layers with bias": (
        lambda: nn.Sequential(nn.Linear(35, 51), nn.Linear(51, 33), nn.Linear(33, 17)), (29, 35), 9
    ),
    "a GELU block": (lambda: gelu_mlp(77, 133), (2, 67, 77), 6),
    "a SwiGLU block": (lambda: SwiGLU(45, 150), (3, 11, 45), 9),
    "one layer used twice": (lambda: Tied(37), (23, 37), 6),
}


def check_against_fp64(model: nn.Module, recipe: str, x: torch.Tensor, matmuls: int, **options: Any) -> None:
    with torch.no_grad():
        dy = torch.randn_like(model(x))
    exact = reference.exact_results(model, x, dy)
    low = reference.results(reference.reference_model(model, LinearLayer(reference.RECIPES[recipe])), x, dy)
    compiled, backend = compile_uncompiled(model, recipe, **options)
    found = Noise(reference.results(compiled, x, dy), exact)
    assert_all_rewritten(backend, matmuls)
    found.check(Noise(low, exact))
    # A gradient or output in FP8 has an FP8 error; without one it was not computed in FP8.
    assert found.error["output"] > 2.0**-8 * found.signal["output"]


PAIRS = [(name, recipe) for name in MODELS for recipe in (RECIPES if name != "one layer used twice" else RECIPES[:1])]


@pytest.mark.parametrize("name, recipe", PAIRS)
def test_output_and_every_gradient_are_within_twice_the_references_error(name: str, recipe: str) -> None:
    make, shape, matmuls = MODELS[name]
    check_against_fp64(make(), recipe, torch.randn(shape), matmuls)


@pytest.mark.parametrize(
    "shape, recipe", [((77,), "tensorwise"), ((77,), "blockwise"), ((1, 77), "rowwise"), ((2, 3, 4, 77), "tensorwise")]
)
def test_inputs_of_any_rank_are_within_twice_the_references_error(shape: tuple[int, ...], recipe: str) -> None:
    check_against_fp64(gelu_mlp(77, 51), recipe, torch.randn(shape), 6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_padded_model_for_a_gpu_is_within_twice_the_references_error(recipe: str) -> None:
    check_against_fp64(gelu_mlp(75, 87), recipe, torch.randn(3, 7, 75), 6, target="cuda:90")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_16_bits_is_within_twice_the_references_error(dtype: torch.dtype) -> None:
    check_against_fp64(gelu_mlp(33, 40).to(dtype), "tensorwise", torch.randn(13, 33).to(dtype), 6)


@each_recipe
def test_a_dynamic_number_of_tokens_keeps_the_numbers_of_each_call(recipe: str) -> None:
    model = nn.Linear(40, 140)
    backend = UncompiledBackend(Config(recipe=recipe))
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (3, 200, 131):
        case = Case("cpu", recipe, tokens, (40, 140))
        x, dy = torch.randn(tokens, 40), torch.randn(tokens, 140)
        exact, roundoff = fp8_exactly(case, model, x, dy)
        Noise(reference.results(compiled, x, dy), exact).check(roundoff)
    # One graph for all; blockwise has another for at most 128 tokens, which are one block.
    assert len(backend.reports) == (2 if recipe == "blockwise" else 1)
    assert_all_rewritten(backend)


class Routed(nn.Module):
    """An expert: how many tokens it gets is known only when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(24, 20)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return self.expert(x[chosen.nonzero().squeeze(1)])


@each_recipe
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_an_expert_that_gets_no_tokens_gives_zero_gradients_and_no_error(recipe: str) -> None:
    model = Routed()
    compiled, backend = compile_uncompiled(model, recipe)
    x = torch.randn(8, 24)
    for chosen in (torch.arange(8) < 5, torch.zeros(8, dtype=torch.bool)):
        model.zero_grad()
        y = compiled(x, chosen)
        y.sum().backward()
        assert y.shape == (chosen.sum(), 20) and y.isfinite().all()
    assert not model.expert.weight.grad.any() and not model.expert.bias.grad.any()
    assert len(backend.reports) == 1, "the same code for no tokens as for some"


@each_recipe
def test_magnitudes_far_from_one_cost_no_accuracy(recipe: str) -> None:
    """Gradients of 1e-8 and activations of 1e4 are what FP8 without scales would lose."""
    model = nn.Linear(40, 24, bias=False)
    x, dy = torch.randn(50, 40), torch.randn(50, 24)
    compiled, _ = compile_uncompiled(model, recipe)
    plain, scaled = (
        Noise(reference.results(compiled, a * x, b * dy), reference.exact_results(model, a * x, b * dy)).snr_db()
        for a, b in ((1.0, 1.0), (2.0**13, 2.0**-27))
    )
    assert scaled == pytest.approx(plain)  # powers of two: the same FP8 values, the same noise


# Training.


@each_recipe
def test_twenty_steps_bring_the_loss_down_about_as_far_as_in_full_precision(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 16))
    twin = copy.deepcopy(model)
    compiled, backend = compile_uncompiled(model, recipe)
    x, y = torch.randn(64, 20), torch.randn(64, 16)
    losses = {name: _train(module, x, y) for name, module in (("fp8", compiled), ("fp32", twin))}
    assert_all_rewritten(backend)
    drops = {name: curve[0] - curve[-1] for name, curve in losses.items()}
    assert drops["fp32"] > 0.1 * losses["fp32"][0], "the task can be learned at all"
    assert drops["fp8"] > drops["fp32"] / 2, losses


def _train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(21):
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


# The peer.


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_signal_to_noise_is_at_most_one_db_below_torchaos_emulated_recipe(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = gelu_mlp(48, 112)
    peer = convert_to_float8_training(copy.deepcopy(model), config=config)
    compiled, backend = compile_uncompiled(model, recipe)
    ours, theirs = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        peer.load_state_dict(model.state_dict())
        x, dy = torch.randn(96, 48), torch.randn(96, 48)
        exact = reference.exact_results(model, x, dy)
        ours.append(Noise(reference.results(compiled, x, dy), exact).snr_db())
        theirs.append(Noise(reference.results(peer, x, dy), exact).snr_db())
    assert_all_rewritten(backend, 6)
    means = {name: tuple(np.mean([run[name] for run in runs]) for runs in (ours, theirs)) for name in ours[0]}
    exact_in_both = {"grad of 3.bias"}  # a plain FP32 sum of dy
    worse = {name: pair for name, pair in means.items() if pair[0] < pair[1] - 1 and name not in exact_in_both}
    assert not worse, f"(ours, torchao's) in dB: {worse}"
    assert min(pair[0] for pair in means.values()) > 15, means


# Behind Inductor.


class Parallel(nn.Module):
    """Two layers side by side: each gemm reads given data, so FP8 roundings cannot differ and only sums do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(75, 41), nn.Linear(75, 41)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.a(x)) + self.b(x)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_code_gives_the_interpreted_graphs_numbers_to_the_roundoff_of_the_sum(recipe: str) -> None:
    model = Parallel()
    x, dy = torch.randn(37, 75), torch.randn(37, 41)
    interpreted = reference.results(compile_uncompiled(model, recipe)[0], x, dy)
    torch._dynamo.reset()
    backend = Backend(Config(recipe=recipe, inductor=CODE_ANEW))  # today's code, not a cached one
    found = reference.results(torch.compile(model, backend=backend), x, dy)
    assert_all_rewritten(backend, 6)
    layer = LinearLayer(reference.RECIPES[recipe])
    exact = reference.results(reference.reference_model(copy.deepcopy(model).double(), layer), x.double(), dy.double())
    in_fp32 = dataclasses.replace(layer, sum_in=np.float32)
    roundoff = Noise(reference.results(reference.reference_model(model, in_fp32), x, dy), exact)
    Noise(found, interpreted).check(roundoff)
    Noise(found, exact).check(roundoff)
