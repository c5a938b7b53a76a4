"""Layers have the names they have in the user's model, and patterns on those names do what they say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, Report, explain
from fp8_compile.backend.module_names import normalise
from fp8_compile.selection import Selection

D = 32
THREE = {"output", "grad_input", "grad_weight"}


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.router, self.breaks = nn.Linear(D, D), nn.Linear(D, D), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.router(x))


class Model(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks) for _ in range(2))
        self.lm_head = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](x)  # not a loop: Dynamo gives up a frame that breaks in a loop
        return self.lm_head(x)


ALL = {"blocks.0.up", "blocks.0.router", "blocks.1.up", "blocks.1.router", "lm_head"}


def data() -> torch.Tensor:
    return torch.randn(8, D, requires_grad=True)


def reports(model: nn.Module, config: Config | None = None) -> list[Report]:
    backend = UncompiledBackend(config)
    torch.compile(model, backend=backend)(data()).sum().backward()
    return backend.reports


def gemms(found: list[Report] | Report, decision: str | None = None) -> dict[str, set[str]]:
    """Which gemms each module has, of one decision or of both."""
    names: dict[str, set[str]] = {}
    for report in [found] if isinstance(found, Report) else found:
        for row in report.rows:
            if decision in (None, row.decision):
                names.setdefault(row.module, set()).add(row.gemm)
    return names


def test_names_are_the_models_own_forward_and_backward() -> None:
    assert gemms(reports(Model())) == dict.fromkeys(ALL, THREE)


def test_names_survive_graph_breaks_inside_submodules() -> None:
    found = reports(Model(breaks=True))
    assert len(found) > 2
    # Without exclusions Dynamo may compile the frames of Block once, for blocks.0, and use them for blocks.1 too.
    names = {name: three for name, three in gemms(found).items() if "blocks.1" not in name}
    assert names == dict.fromkeys({"blocks.0.up", "blocks.0.router", "lm_head"}, THREE)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.ones(D, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.gain)


def test_a_submodule_that_is_a_frame_of_its_own_keeps_its_name_and_its_exclusion() -> None:
    """As after a graph break in a caller that can't be resumed: the matmuls are written in the frame's own module."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled()

        @torch._dynamo.disable(recursive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    assert gemms(reports(Outer()), "rewritten") == {"inner": THREE}
    assert gemms(reports(Outer(), Config(exclude="inner")), "skipped") == {"inner": THREE}


def test_a_compiled_function_names_the_model_it_closes_over() -> None:
    model, backend = Model(), UncompiledBackend(Config(exclude="blocks.0"))

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    step(data()).backward()
    assert set(gemms(backend.reports)) == ALL
    assert set(gemms(backend.reports, "skipped")) == {"blocks.0.up", "blocks.0.router", "lm_head"}


def test_a_compiled_function_of_two_models_tells_them_apart() -> None:
    backend = UncompiledBackend()

    @torch.compile(backend=backend)
    def step(encoder: nn.Module, decoder: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return decoder(torch.tanh(encoder(x))).sum()

    step(nn.Sequential(nn.Linear(D, D)), nn.Sequential(nn.Linear(D, D)), data()).backward()
    assert gemms(backend.reports) == {"encoder.0": THREE, "decoder.0": THREE}


def test_products_of_torch_func_grad_have_the_names_of_their_weights_and_heads_stay_spared() -> None:
    """Its backward is traced as one op without a module; a product with a parameter says which."""
    model, backend = Model(), UncompiledBackend(Config(exclude="blocks.1.up"))

    @torch.compile(backend=backend)
    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: model(x).square().mean())(x)

    slope(data().detach()).sum().backward()
    (report,) = backend.reports
    outputs = [row.module for row in report.rows if row.gemm == "output"]
    assert sorted(outputs) == sorted(2 * [*ALL]), "forward, and the gradient of the input"
    assert set(gemms(report, "skipped")) == {"blocks.1.up", "lm_head"}
    assert set(gemms(report, "rewritten")) == ALL - {"blocks.1.up", "lm_head"}


def test_a_function_that_multiplies_by_a_parameter_is_named_by_its_module() -> None:
    model, backend = Model(), UncompiledBackend(Config(exclude="blocks.0"))

    @torch.compile(backend=backend)
    def product(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, model.blocks[0].up.weight).tanh(), model.blocks[1].up.weight)

    product(data()).sum().backward()
    assert gemms(backend.reports, "skipped") == {"blocks.0.up": THREE}
    assert gemms(backend.reports, "rewritten") == {"blocks.1.up": THREE}


def test_a_compiled_method_and_module_compile_have_the_same_names() -> None:
    by_forward, by_method = Model(), Model()
    for_forward, for_method = UncompiledBackend(), UncompiledBackend()
    by_forward.forward = torch.compile(by_forward.forward, backend=for_forward)  # type: ignore[method-assign]
    by_method.compile(backend=for_method)
    for model, backend in ((by_forward, for_forward), (by_method, for_method)):
        model(data()).sum().backward()
        assert gemms(backend.reports) == dict.fromkeys(ALL, THREE)


# --- patterns


@pytest.mark.parametrize("pattern, excluded", [
    ("blocks.0.up", {"blocks.0.up"}),
    ("blocks.*.router", {"blocks.0.router", "blocks.1.router"}),
    ("*.up", {"blocks.0.up", "blocks.1.up"}),
    ("blocks.1", {"blocks.1.up", "blocks.1.router"}),
    ("blocks", {"blocks.0.up", "blocks.0.router", "blocks.1.up", "blocks.1.router"}),
    ("blocks.?.up", {"blocks.0.up", "blocks.1.up"}),
    ("blocks.[0].*", {"blocks.0.up", "blocks.0.router"}),
    ("blocks.1.up.weight", {"blocks.1.up"}),
])  # fmt: skip
def test_a_pattern_excludes_all_three_gemms_of_what_it_names_and_nothing_else(pattern: str, excluded: set[str]) -> None:
    report = explain(Model(), (data(),), config=Config(exclude=pattern))
    assert gemms(report, "skipped") == dict.fromkeys(excluded | {"lm_head"}, THREE)
    assert gemms(report, "rewritten") == dict.fromkeys(ALL - excluded - {"lm_head"}, THREE)
    reasons = {row.reason for row in report.skipped if row.module != "lm_head"}
    assert reasons == {f"excluded by {pattern!r}"}


def test_an_excluded_layer_computes_exactly_what_eager_computes() -> None:
    model = Model()
    config = Config(exclude="blocks")
    x = data()
    y = torch.compile(model, backend=UncompiledBackend(config))(x)
    y.sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = model(x)
    expected.sum().backward()
    torch.testing.assert_close(y, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, msg=name)


@pytest.mark.parametrize("head", ["lm_head", "embed_out", "head", "output_head"])
def test_an_output_head_is_spared_unless_include_names_it(head: str) -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(D, D)
            self.add_module(head, nn.Linear(D, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, head)(torch.tanh(self.up(x)))

    report = explain(Headed(), (data(),))
    assert gemms(report, "skipped") == {head: THREE} and gemms(report, "rewritten") == {"up": THREE}
    assert all("output head" in row.reason and "include" in row.reason for row in report.skipped)
    report = explain(Headed(), (data(),), config=Config(include=("*", head)))
    assert gemms(report, "rewritten") == {head: THREE, "up": THREE}


def test_include_spares_what_it_does_not_name() -> None:
    report = explain(Model(), (data(),), config=Config(include="blocks.*.up"))
    assert gemms(report, "rewritten") == {"blocks.0.up": THREE, "blocks.1.up": THREE}
    assert {row.reason for row in report.skipped} == {"not in include"}


def test_exclude_wins_over_include() -> None:
    report = explain(Model(), (data(),), config=Config(include="blocks", exclude="blocks.1"))
    assert set(gemms(report, "rewritten")) == {"blocks.0.up", "blocks.0.router"}


@pytest.mark.parametrize("field", ["exclude", "include"])
@pytest.mark.parametrize("pattern, nearest", [
    ("lm_haed", "lm_head"), ("blocks.*.ruoter", "blocks.0.router"), ("block", "blocks"),
])  # fmt: skip
def test_a_pattern_that_matches_nothing_lists_the_nearest_names(field: str, pattern: str, nearest: str) -> None:
    with pytest.raises(Exception, match=rf"{field} pattern '.*' matches no module.*nearest names:.*\b{nearest}\b"):
        explain(Model(), (data(),), config=Config(**{field: pattern}))
    with pytest.raises(Exception, match=f"{field} pattern"):
        torch.compile(Model(), backend=UncompiledBackend(Config(**{field: pattern})))(data())


def test_a_pattern_may_name_a_layer_of_another_graph_of_the_model() -> None:
    """Each graph between breaks sees only some of the layers; a pattern is checked against all."""
    found = reports(Model(breaks=True), Config(exclude="blocks.0.router"))
    assert gemms(found, "skipped")["blocks.0.router"] == THREE
    assert gemms(found, "rewritten")["blocks.0.up"] == THREE


@pytest.mark.parametrize("excluded", [0, 1])
def test_blocks_that_share_a_frame_after_a_graph_break_do_not_share_an_exclusion(excluded: int) -> None:
    """Dynamo would use the code compiled for blocks.0 for blocks.1 too: parameters are inputs of the frame."""
    found, other = reports(Model(breaks=True), Config(exclude=f"blocks.{excluded}")), 1 - excluded
    spared = {f"blocks.{excluded}.up", f"blocks.{excluded}.router", "lm_head"}
    assert gemms(found, "skipped") == dict.fromkeys(spared, THREE)
    assert gemms(found, "rewritten") == dict.fromkeys({f"blocks.{other}.up", f"blocks.{other}.router"}, THREE)


@pytest.mark.parametrize("pattern", ["weight", "gain"])
def test_a_parameter_is_excluded_by_name_also_when_the_weight_is_computed_from_it(pattern: str) -> None:
    report = explain(Scaled(), (data(),), config=Config(exclude=pattern))
    assert not report.rewritten, str(report)


def test_a_tied_weight_excluded_under_one_name_leaves_the_layer_with_the_other_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.out = nn.Embedding(64, D), nn.Linear(D, D), nn.Linear(D, 64, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.up(self.embed(ids))))

    ids = torch.randint(0, 64, (2, 8))
    assert gemms(explain(Tied(), (ids,), config=Config(exclude="out")), "skipped") == {"out": THREE}
    assert gemms(explain(Tied(), (ids,), config=Config(exclude="out.weight")), "skipped") == {"out": THREE}


def test_paths_of_dynamo_and_of_export_are_one_name() -> None:
    assert normalise("L['self'].blocks.0") == "blocks.0"
    assert normalise("L['self']._modules['blocks']._modules['0']") == "blocks.0"
    assert normalise("blocks.0") == "blocks.0"
    assert normalise("L['fn'].__closure__[0].cell_contents.up") == "up"
    assert normalise("L['self']") == ""
    assert normalise("getattr(getattr(L['loss'].__closure__[0].cell_contents, '0'), '1')") == "0.1"
    assert normalise("L['models'][0].up") == "0.up" and normalise("L['models']['critic'].up") == "critic.up"


def test_models_in_a_list_are_named_by_their_index_and_a_pattern_can_name_one() -> None:
    models = [nn.Sequential(nn.Linear(D, D)), nn.Sequential(nn.Linear(D, D))]

    def both(x: torch.Tensor) -> torch.Tensor:
        return models[0](x) + models[1](x)

    report = explain(both, (torch.randn(4, D),), config=Config(exclude=("1.*",)))
    assert {row.module for row in report.rewritten} == {"0.0"}
    assert {(row.module, row.reason) for row in report.skipped} == {("1.0", "excluded by '1.*'")}


def test_a_selection_gives_the_first_reason_against() -> None:
    selection = Selection(include=("*",), exclude=("a.b", "*.c"))
    assert selection.reason_against("a.b.x") == "excluded by 'a.b'"
    assert selection.reason_against("z", ("z.c",)) == "excluded by '*.c'"
    assert selection.reason_against("a.bx", ("a.bx.weight",)) is None, "a name is not a prefix of letters"
