"""The backend among the rest of torch.compile: modes, breaks, recompiles, checkpoints, errors, logs."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from uncompiled import UncompiledBackend

from fp8_compile import Backend, Config

D = 32


def snr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (actual.double() - expected.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    return float("inf") if noise == 0 else 10 * torch.tensor(signal / noise).log10().item()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))


def run_python(source: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a user's script in a process of its own, away from this repository."""
    script = folder / "script.py"
    script.write_text(source)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environ.pop("TORCH_LOGS", None)  # torch imports what it is asked to log
    environ.update(environment)
    done = subprocess.run([sys.executable, str(script)], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


# --- the real thing


def test_the_name_fp8_is_found_without_importing_us(tmp_path: Path) -> None:
    done = run_python(
        """
import sys
import torch
from torch._dynamo import list_backends, lookup_backend

assert "fp8" in list_backends()
print("fp8_compile" in sys.modules, lookup_backend("fp8").__module__, "fp8_compile" in sys.modules)
""",
        tmp_path,
    )
    assert done.stdout.split() == ["False", "fp8_compile.backend.entry_point", "True"]


def test_backend_fp8_trains_and_logs_one_line(tmp_path: Path) -> None:
    """One real compile: entry point, options, Inductor's code, TORCH_LOGS, FP8_COMPILE_DUMP and the state dict."""
    done = run_python(
        """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
compiled = torch.compile(model, backend="fp8", options={"exclude": ("2",)})
x = torch.randn(16, 32)
y = compiled(x)
y.square().sum().backward()
grad = model[0].weight.grad.clone()
model.zero_grad()
expected = model(x)
expected.square().sum().backward()

def snr(a, b):
    return (10 * torch.log10(b.square().sum() / (a - b).square().sum())).item()

print("output", snr(y.detach(), expected.detach()))
print("grad", snr(grad, model[0].weight.grad))
after = model.state_dict()
assert list(after) == list(before) and all(torch.equal(before[name], after[name]) for name in after)
""",
        tmp_path,
        TORCH_LOGS="+fp8_compile",
        FP8_COMPILE_DUMP=str(tmp_path / "dumps"),
    )
    figures = dict(line.split() for line in done.stdout.splitlines())
    assert 20 < float(figures["output"]) < 60 and 15 < float(figures["grad"]) < 60
    lines = [line for line in done.stderr.splitlines() if "rewrote" in line]
    assert len(lines) == 1, done.stderr[-2000:]
    assert "rewrote 2 of 5 matmuls (2: excluded by '2')" in lines[0]
    names = {path.name for path in (tmp_path / "dumps" / "graph_000").iterdir()}
    assert {"report.json", "joint.00_before.py", "joint.01_rewrite_matmuls.diff", "joint.graphml"} <= names
    assert any(name.startswith("backward.") for name in names), names


def test_mode_max_autotune_compiles_and_is_right() -> None:
    model = nn.Linear(D, D)
    x = torch.randn(16, D)
    y = torch.compile(model, backend="fp8", mode="max-autotune")(x)
    assert 20 < snr(y, model(x)) < 60


def test_a_selection_that_is_empty_at_run_time_is_right_in_inductors_code() -> None:
    class Selected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(D, D)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.up(x[keep.nonzero().squeeze(1)])

    model, x = Selected(), torch.randn(10, D)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend="fp8", fullgraph=True)
        some = torch.arange(10) < 4
        assert 20 < snr(compiled(x, some), model(x, some)) < 60
        none = torch.zeros(10, dtype=torch.bool)
        compiled(x, none).sum().backward()
    assert model.up.weight.grad.eq(0).all()


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_constant_that_inductor_folds_is_multiplied_as_it_is(recipe: str) -> None:
    """What is made of parameters and constants alone stays in high precision, and does not fail."""

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(torch.full((8, D), -0.7))

    model, x = Started(), torch.zeros(8, D)
    y = torch.compile(model, backend="fp8", options={"recipe": recipe})(x)
    y.sum().backward()
    assert snr(y, model(x)) > 100
    assert snr(model.up.weight.grad, torch.full((D, D), -0.7 * 8)) > 100


# --- what torch.compile can do


def test_fullgraph_takes_the_whole_model() -> None:
    backend = UncompiledBackend()
    torch.compile(mlp(), backend=backend, fullgraph=True)(torch.randn(8, D))
    assert len(backend.reports) == 1


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 48), nn.Linear(48, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        return self.down(h)


def test_a_graph_break_makes_two_reports_and_gradients_flow_through() -> None:
    model, backend, x = Breaks(), UncompiledBackend(), torch.randn(8, D)
    reference = copy.deepcopy(model)
    y, expected = torch.compile(model, backend=backend)(x), reference(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert [{row.module for row in report.rows} for report in backend.reports] == [{"up"}, {"down"}]
    assert snr(y, expected) > 20 and snr(model.up.weight.grad, reference.up.weight.grad) > 15


def test_a_recompile_adds_a_report_with_the_new_sizes() -> None:
    model, backend = mlp(), UncompiledBackend(Config(recipe="tensorwise"))
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for tokens in (4, 6, 4):
        x = torch.randn(tokens, D)
        assert snr(compiled(x), model(x)) > 20
    assert [report.rows[0].shape[0] for report in backend.reports] == [4, 6]


def test_switching_to_eval_and_no_grad_drops_the_backward() -> None:
    model, backend, x = mlp(), UncompiledBackend(), torch.randn(8, D)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    with torch.no_grad():
        without = compiled(x)
    with torch.inference_mode():
        inference = compiled(x)
    assert {row.gemm for row in backend.reports[0].rows} == {"output", "grad_input", "grad_weight"}
    assert all({row.gemm for row in report.rows} == {"output"} for report in backend.reports[1:])
    assert snr(without, model(x)) > 20 and torch.equal(without, inference)


class Checkpointed(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down, self.out, self.recompute = nn.Linear(D, 64), nn.Linear(64, D), nn.Linear(D, D), recompute

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + (checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x))
        return self.out(x)


def test_activation_checkpointing_gives_the_same_bits_and_the_same_rows() -> None:
    data, results, rows = torch.randn(2, 8, D), [], []
    for recompute in (True, False):
        torch.manual_seed(0)
        model, backend, x = Checkpointed(recompute), UncompiledBackend(), data.clone().requires_grad_()
        y = torch.compile(model, backend=backend, fullgraph=True)(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())])
        rows.append(sorted((row.module, row.gemm, row.decision) for row in backend.reports[0].rows))
    assert rows[0] == rows[1] and len(rows[0]) == 15
    for with_checkpoint, without in zip(*results):
        assert torch.equal(with_checkpoint, without)


def test_accumulated_gradients_are_the_sum_of_the_gradients() -> None:
    model = mlp()
    compiled = torch.compile(model, backend=UncompiledBackend(Config(recipe="tensorwise")))
    batches, apart = [torch.randn(8, D) for _ in range(3)], torch.zeros(48, D)
    for x in batches:
        model.zero_grad()
        compiled(x).square().sum().backward()
        apart += model[0].weight.grad
    model.zero_grad()
    for x in batches:
        compiled(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, apart, rtol=1e-6, atol=1e-6)


def test_the_state_dict_does_not_change_by_compiling_and_running() -> None:
    model = mlp()
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    torch.compile(model, backend=UncompiledBackend())(torch.randn(8, D)).sum().backward()
    after = model.state_dict()
    assert list(after) == list(before)
    for name, (tensor, address) in before.items():
        assert torch.equal(after[name], tensor) and after[name].data_ptr() == address, name


def test_new_weights_are_seen_without_recompiling() -> None:
    model, backend, x = mlp(), UncompiledBackend(Config(recipe="tensorwise")), torch.randn(8, D)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    model.load_state_dict({name: 3 * tensor for name, tensor in model.state_dict().items()})
    assert snr(compiled(x), model(x)) > 20 and len(backend.reports) == 1


def test_users_own_joint_graph_pass_still_runs_before_ours() -> None:
    calls: list[str] = []

    class Mine(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            calls.append(" ".join(str(node.target) for node in graph.nodes))

        def uuid(self) -> str:
            return "mine"

    backend = UncompiledBackend(Config(inductor={"joint_custom_pre_pass": Mine()}))
    torch.compile(mlp(), backend=backend)(torch.randn(8, D))
    assert len(calls) == 1 and "addmm" in calls[0] and "float8" not in calls[0]
    assert backend.reports[0].rewritten


# --- errors


def test_an_unknown_option_is_an_error_that_names_it_and_the_nearest() -> None:
    with pytest.raises(Exception, match="unknown fp8 option 'exlude'.*did you mean 'exclude'"):
        torch.compile(mlp(), backend="fp8", options={"exlude": "lm_head"})(torch.randn(8, D))


def test_options_beside_a_backend_object_contradict() -> None:
    with pytest.raises(Exception, match=r"options \['recipe'\] and a Backend object contradict.*in its Config"):
        torch.compile(mlp(), backend=Backend(Config()), options={"recipe": "rowwise"})(torch.randn(8, D))


def test_a_backend_wants_a_config() -> None:
    with pytest.raises(TypeError, match=r"Backend expects a Config, got dict: write Backend\(Config"):
        Backend({"recipe": "rowwise"})  # type: ignore[arg-type]


def test_a_float64_model_is_an_error_that_names_a_layer_and_the_remedy() -> None:
    with pytest.raises(Exception, match=r"no layer can run in FP8: 0 .*float64; expected float32.*model\.float\(\)"):
        torch.compile(mlp().double(), backend=UncompiledBackend())(torch.randn(8, D).double())


def test_one_float64_layer_among_others_is_skipped_with_the_reason() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.fine = nn.Linear(D, D), nn.Linear(D, D).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fine(torch.tanh(self.up(x)).double())

    backend = UncompiledBackend()
    torch.compile(Mixed(), backend=backend)(torch.randn(8, D)).sum().backward()
    assert {row.module for row in backend.reports[0].rewritten} == {"up"}
    assert all("float64" in row.reason for row in backend.reports[0].skipped)


def test_create_graph_is_an_error_when_it_is_asked_for() -> None:
    x = torch.randn(8, D, requires_grad=True)
    y = torch.compile(nn.Linear(D, D), backend=Backend())(x)
    with pytest.raises(RuntimeError, match="create_graph=True is not supported.*Expected create_graph=False"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(torch.compile(nn.Linear(D, D), backend=Backend())(x).sum(), x)
