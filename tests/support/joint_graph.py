"""Joint graphs of small models without compiling anything, and what a test asks of them.

    joint = joint_graph(nn.Linear(32, 64, bias=False), torch.randn(8, 32))     # as Inductor's pre-pass sees it
    steps = run_passes(joint, make(target="cuda:90"))                           # our passes, one after the other
    render(steps[-1].graph)                                                     # graph_text.py: for a golden test
    run(steps[-1].graph, random_inputs(joint.graph))                            # its numbers

``_scaled_mm`` is computed here by its definition in FP64: what a graph for a GPU means can be checked on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from graph_text import describe
from torch import fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._subclasses import FakeTensorMode

from fp8_compile import Config, Report, Target
from fp8_compile.backend.explain import run_uncompiled
from fp8_compile.backend.fused_inference_ops import decompose_fused_ops
from fp8_compile.backend.graph import compile_graph, make_rules
from fp8_compile.backend.module_names import ModuleNames
from fp8_compile.kernels.gpu.cublaslt_mm import cublaslt_mm_op
from fp8_compile.passes.graph.matmul import Matmul, OtherMatmul
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.graph_pass import GraphPass
from fp8_compile.passes.invariants import check_graph
from fp8_compile.passes.joint.find_matmuls import find_matmuls
from fp8_compile.passes.pipeline import JointPipeline
from fp8_compile.selection import Selection

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NO_CACHE = {"force_disable_caches": True}


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """One graph, forward and backward together, and the names of its modules and parameters."""

    graph: fx.Graph
    names: ModuleNames

    def copy(self) -> fx.Graph:
        return copy_graph(self.graph)

    def matmuls(self) -> list[Matmul | OtherMatmul]:
        return find_matmuls(self.graph, self.names)


@dataclasses.dataclass(frozen=True)
class Step:
    """The graph after one pass; ``changes`` is what the pass reported."""

    name: str
    changes: int
    graph: fx.Graph


@dataclasses.dataclass(frozen=True)
class Split:
    """The two halves of a graph after the partitioner, before Inductor's passes on each of them."""

    forward: fx.Graph
    backward: fx.Graph
    report: Report

    @property
    def saved(self) -> list[fx.Node]:
        """What backward gets from forward: activations, inputs, weights, scales."""
        inputs = self.backward.find_nodes(op="placeholder")
        return [node for node in inputs if not node.name.startswith("tangents")]

    @property
    def saved_activations(self) -> list[str]:
        """The saved tensors that forward computed and that have more than one element, as text."""
        mine = [node for node in self.saved if not node.name.startswith("primals")]
        return [describe(node.meta["val"]) for node in mine if node.meta["val"].numel() > 1]


def joint_graph(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
    allow_several: bool = False,
    include: Sequence[str] = (),
) -> JointGraph:
    """The joint graph of ``model(*args)``, cleaned up by Inductor, before any pass of ours. Where there are several
    (graph breaks, subgraphs), the last. ``include`` names buffers and arguments that are weights."""
    found: list[JointGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        decompose_fused_ops(gm)
        names = ModuleNames.of_graph(gm, include)

        def record(graph: fx.Graph) -> None:
            found.append(JointGraph(copy_graph(graph), names))

        patches = {"joint_custom_pre_pass": record, **NO_CACHE}
        return compile_fx(gm, list(example_inputs), inner_compile=run_uncompiled, config_patches=patches)

    torch.compile(model, backend=backend, dynamic=dynamic)(*args)
    assert found and (len(found) == 1 or allow_several), f"expected one graph, got {len(found)}"
    return found[-1]


def split(model: nn.Module | Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any) -> Split:
    """Forward and backward as Inductor would compile them with our backend."""
    halves: list[fx.Graph] = []
    reports: list[Report] = []

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        halves.append(copy_graph(gm.graph))
        return make_boxed_func(lambda *inputs: ReferenceInterpreter(gm).run(*inputs))

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        config = Config(**{"recipe": "tensorwise", **options, "inductor": {**options.get("inductor", {}), **NO_CACHE}})
        compiled, report = compile_graph(gm, example_inputs, config, inner_compile=inner)
        reports.append(report)
        return compiled

    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for _ in range(2):
        if len(halves) < 2:  # under delayed scaling a GPU's backward is compiled when it first runs, in the second step
            result = compiled(*args)
            result.backward(torch.randn_like(result))
    assert len(halves) == 2, f"expected a forward and a backward graph, got {len(halves)}"
    return Split(halves[0], halves[1], reports[0])


def make(target: str = "cpu", **options: Any) -> Rules:
    """The rules that the backend would make of these options."""
    config = Config(**{"recipe": "tensorwise", "target": target, **options})
    return make_rules(config, Target.parse(target), Selection(config.include, config.exclude))


def run_passes(joint: JointGraph, rules: Rules) -> list[Step]:
    """The graph before, and after each pass of the joint pipeline; ``joint`` itself stays as it is."""
    graph = joint.copy()
    steps = [Step("before", 0, copy_graph(graph))]
    for one in JointPipeline(rules, joint.names, key="").passes:
        steps.append(Step(one.name, apply(one, graph), copy_graph(graph)))
    return steps


def apply(one: GraphPass, graph: fx.Graph) -> int:
    """Run one pass in place, with the cleaning and the checks that the pipeline does after it; return how many places
    it changed."""
    report = one.run(graph)
    graph.eliminate_dead_code()
    graph.lint()
    check_graph(graph, one.name, one.leaves_no)
    return report.changes


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Another graph with the same nodes, names and metadata."""
    twin = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapped[node] = twin.node_copy(node, mapped.__getitem__)
    return twin


class ReferenceInterpreter(fx.Interpreter):
    """Runs a graph on real tensors, ``_scaled_mm`` by its definition in FP64 whatever its scales are."""

    def __init__(self, graph: fx.Graph | fx.GraphModule) -> None:
        module = graph if isinstance(graph, fx.GraphModule) else fx.GraphModule({}, graph)
        super().__init__(module)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten._scaled_mm.default:
            return reference_scaled_mm(*args, **kwargs)
        if target is aten._scaled_grouped_mm.default:
            return reference_scaled_grouped_mm(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def random_inputs(graph: fx.Graph, seed: int = 0) -> list[Any]:
    """Normal numbers for each placeholder; a symbolic size gets the size it was traced with."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(node.meta["val"], generator) for node in graph.find_nodes(op="placeholder")]


def run(graph: fx.Graph, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """What the graph returns for these inputs."""
    with torch.no_grad():
        return list(ReferenceInterpreter(graph).run(*inputs))


def assert_same_results(graph: fx.Graph, other: fx.Graph, inputs: Sequence[Any]) -> None:
    """Both graphs return the same: numbers bit for bit (any NaN is like any other), dtypes, sizes."""
    for one, two in zip(run(graph, inputs), run(other, inputs), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(two, one, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == two


def reference_scaled_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """``(left * scale_left) @ (right * scale_right) + bias`` in FP64, each scale spread over its block of 1, 128 or
    all."""
    product = _spread(left, scale_left) @ _spread(right, scale_right)
    return (product if bias is None else product + bias.double()).to(out_dtype)


def reference_scaled_grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Row by row in FP64; scales of rows and of each group's columns. Where the contraction goes over groups, each has
    scales of rows and columns of its own. torch has no such operation for CPUs."""
    if right.dim() == 2:
        ends, parts = offsets.tolist(), []
        assert all(end % 16 == 0 for end in ends), ends
        for group, (start, end) in enumerate(zip([0, *ends], ends)):
            rows, columns = (scale.view(len(ends), -1)[group].double() for scale in (scale_left, scale_right))
            product = left[:, start:end].double() @ right[start:end].double()
            parts.append(product * rows[:, None] * columns)
        return torch.stack(parts).to(out_dtype)
    groups = torch.bucketize(torch.arange(left.shape[0]), offsets, right=True)
    rows = left.double() * scale_left.double()[:, None]
    columns = right.double() * scale_right.double()[:, None, :]
    return torch.stack([row @ columns[group] for row, group in zip(rows, groups)]).to(out_dtype)


def _spread(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    for dim in (0, 1):
        if scale.shape[dim] not in (1, q.shape[dim]):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, q.shape[dim])
    return q.double() * scale.double()


def assert_gpu_accepts(graph: fx.Graph) -> int:
    """Every FP8 gemm of the graph passes the checks that torch itself makes for a GPU, and those that only cuBLAS
    makes; how many there are."""
    gemms = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    for node in gemms:
        left, right, scale_left, scale_right = (arg.meta["val"] for arg in node.args)
        bias, out_dtype = node.kwargs["bias"], node.kwargs["out_dtype"]
        check_accepted(
            left, right, scale_left, scale_right, out_dtype=out_dtype, use_fast_accum=node.kwargs["use_fast_accum"]
        )
        assert {left.dtype, right.dtype} != {torch.float8_e5m2}, f"{node}: no GPU multiplies e5m2 by e5m2"
        if bias is not None:
            assert bias.meta["val"].dtype == out_dtype != torch.float32, f"{node}: a bias is added in 16 bits only"
        if scale_left.numel() > 1 or scale_right.numel() > 1:
            assert out_dtype is torch.bfloat16, f"{node}: {out_dtype} with more than one scale"
    by_cublaslt = graph.find_nodes(op="call_function", target=cublaslt_mm_op)
    for node in by_cublaslt:
        left, right, *scales = (arg.meta["val"] for arg in node.args[:4])
        assert left.shape[1] == right.shape[0] and {scale.numel() for scale in scales} == {1}
        assert {left.dtype, right.dtype} != {torch.float8_e5m2}, f"{node}: no GPU multiplies e5m2 by e5m2"
        for side in (left, right):
            assert min(side.stride()) == 1 and max(side.stride()) % 16 == 0, f"{node}: strides {side.stride()}"
        assert left.shape[1] % 16 == right.shape[1] % 16 == 0, f"{node}: {left.shape} by {right.shape}"
    grouped = graph.find_nodes(op="call_function", target=aten._scaled_grouped_mm.default)
    for node in grouped:
        with FakeTensorMode():
            torch._scaled_grouped_mm(*(_on_gpu(arg.meta["val"]) for arg in node.args), **node.kwargs)
    return len(gemms) + len(by_cublaslt) + len(grouped)


def check_accepted(*operands_and_scales: torch.Tensor, **options: Any) -> None:
    """Torch's own checks of sizes, strides and dtypes for a gemm on a GPU."""
    with FakeTensorMode():
        torch._scaled_mm(*map(_on_gpu, operands_and_scales), **options)


def _on_gpu(val: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="cuda")


def fp8(x: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = (-1, -1)) -> torch.Tensor:
    """x rounded to FP8 with one scale a block (rows, columns; -1: all), in FP64: a loop over blocks, to be slow and
    plainly right."""
    largest = torch.finfo(dtype).max
    result = torch.empty(x.shape, dtype=torch.float64)
    rows, cols = (size if b == -1 else b for size, b in zip(x.shape, block))
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            tile = x[i : i + rows, j : j + cols].float()
            scale = largest / tile.abs().max().clamp(min=1e-12)
            rounded = (tile * scale).clamp(-largest, largest).to(dtype)
            result[i : i + rows, j : j + cols] = rounded.double() / scale.double()
    return result


class _Fp8Product(torch.autograd.Function):
    """``x @ w`` and its two gradients with every operand rounded to FP8, in FP64."""

    # (rows, contraction) of the gemm, as DESIGN.md section 4 has it; input and gradient alike.
    BLOCKS = {"tensorwise": ((-1, -1), (-1, -1)), "rowwise": ((1, -1), (1, -1)), "blockwise": ((1, 128), (128, 128))}

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, recipe: str, backward_format: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe, ctx.format = recipe, backward_format
        activation, weight = _Fp8Product.BLOCKS[recipe]
        return fp8(x, E4M3, activation) @ fp8(w, E4M3, weight[::-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        activation, weight = _Fp8Product.BLOCKS[ctx.recipe]
        dx = fp8(dy, ctx.format, activation) @ fp8(w.T, E4M3, weight[::-1])
        dw = fp8(x.T, E4M3, activation) @ fp8(dy, ctx.format, activation[::-1])
        return dx, dw, None, None


def fp8_product(x: torch.Tensor, w: torch.Tensor, recipe: str = "tensorwise") -> torch.Tensor:
    """``x @ w`` of an input and a weight as the recipe has it, forward and backward, in FP64."""
    return _Fp8Product.apply(x, w, recipe, E5M2 if recipe == "tensorwise" else E4M3)


def assert_numbers(
    steps: Sequence[Step], reference: Callable[..., torch.Tensor], *, tolerance: float = 1e-5
) -> None:
    """The graph after each pass gives what ``reference`` and autograd give in FP64 for the same inputs."""
    inputs = random_inputs(steps[0].graph)
    primals = [x.double().requires_grad_() for x in inputs[:-1]]
    y = reference(*primals)
    expected = [y.detach(), *torch.autograd.grad(y, primals, inputs[-1].double())]
    for step in steps[1:]:
        results = [result.double() for result in run(step.graph, inputs)]
        for at, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            close = torch.testing.assert_close
            where = f"{step.name}, result {at}"
            close(result, wanted, rtol=tolerance, atol=tolerance, msg=lambda text, where=where: f"{where}: {text}")


def _random(val: Any, generator: torch.Generator) -> Any:
    if not isinstance(val, torch.Tensor):
        return int(val.node.hint) if isinstance(val, torch.SymInt) else val
    shape = [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in val.shape]
    if not val.dtype.is_floating_point:
        return torch.zeros(shape, dtype=val.dtype)
    return torch.randn(shape, generator=generator).to(val.dtype)
