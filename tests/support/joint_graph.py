"""Joint graphs of small models without compiling anything, and what a test asks of them.

    joint = joint_graph(nn.Linear(32, 64, bias=False), torch.randn(8, 32))     # as Inductor's pre-pass sees it
    steps = run_passes(joint, make(target="cuda:90"))                           # our passes, one after the other
    render(steps[-1].graph)                                                     # text for a golden test
    run(steps[-1].graph, random_inputs(joint.graph))                            # its numbers

``_scaled_mm`` is computed here by its definition in FP64: what a graph for a GPU means can be checked on a CPU.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch._subclasses import FakeTensorMode

from fp8_compile import Config, Report, Target
from fp8_compile.backend import compile_graph, make_rules
from fp8_compile.explain import run_uncompiled
from fp8_compile.fast_paths import open_fast_paths
from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.kernels.gpu.cublaslt_mm import cublaslt_mm_op
from fp8_compile.module_names import ModuleNames, Selection
from fp8_compile.passes.decide import Rules
from fp8_compile.passes.find_matmuls import Matmul, OtherMatmul, find_matmuls
from fp8_compile.passes.graph_pass import GraphPass
from fp8_compile.passes.pipeline import JointPipeline

aten = torch.ops.aten
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHORT_NAMES = {"convert_element_type": "to", "constant_pad_nd": "pad"}
SEEN_IN_THE_VALUE = ("out_dtype", "memory_format")  # arguments that the type on the left says too
NO_CACHE = {"force_disable_caches": True}
DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "b8",
    **{dtype: format.name for dtype, format in BY_DTYPE.items()},
}


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
    """The two halves of a graph behind the partitioner, before Inductor's passes on each of them."""

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
    model: nn.Module | Callable[..., Any], *args: Any, dynamic: bool = False, allow_several: bool = False
) -> JointGraph:
    """The joint graph of ``model(*args)``, cleaned up by Inductor, before any pass of ours. Where there are several
    (graph breaks, subgraphs), the last."""
    found: list[JointGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        open_fast_paths(gm)
        names = ModuleNames.of_graph(gm)

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
        if len(halves) < 2:  # under delayed scaling a GPU's backward is compiled when it first runs, at the second pass
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
    """One pass in place, with the cleaning that the pipeline does after it; how many places it changed."""
    report = one.run(graph)
    graph.eliminate_dead_code()
    graph.lint()
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
    return len(gemms) + len(by_cublaslt)


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


def render(graph: fx.Graph, only: Callable[[fx.Node], bool] | None = None) -> str:
    """A line a node: ``mm: f32[8, 64] = mm(primals_2, primals_1.T)``; with ``only``, of those nodes.

    Nodes are called by their op and counted. A transpose is ``.T`` where it is used, one result of several is
    ``quantize[0]``, an alias is what it stands for. A matrix that lies column by column is ``f32[32, 64]T``; any other
    layout that is not row-major has its strides in braces. Arguments that are None or False are left out.
    """
    seen: collections.Counter[str] = collections.Counter()
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append("return " + _text(node.args[0], names)[1:-1])
        elif (short := _shorthand(node, names)) is not None:
            names[node] = short
        else:
            op = op_name(node) if node.op == "call_function" else node.name
            names[node] = f"{op}_{seen[op]}" if seen[op] else op
            seen[op] += 1
            if only is None or only(node):
                lines.append(_line(node, names))
    return "\n".join("\n    ".join(textwrap.wrap(line, 116)) for line in lines) + "\n"


def ops(graph: fx.Graph) -> dict[str, int]:
    """How often each op occurs."""
    return dict(collections.Counter(op_name(node) for node in graph.nodes if node.op == "call_function"))


def op_name(node: fx.Node) -> str:
    """``mm`` for ``aten.mm.default``, ``bitcast`` for ``aten.view.dtype``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", str(node.target))
    name = node.target._schema.name.partition("::")[2]
    if node.target is aten.view.dtype:
        return "bitcast"
    return SHORT_NAMES.get(name, name)


def describe(val: Any) -> str:
    """``bf16[8, 64]``, ``e4m3[32, 64]T``, ``(e4m3[8, 32], f32[1, 1])``."""
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(map(describe, val)) + ")"
    if not isinstance(val, torch.Tensor):
        return str(val)
    text = f"{DTYPES[val.dtype]}[{', '.join(map(str, val.shape))}]"
    if val.is_contiguous():
        return text
    return text + ("T" if val.dim() == 2 and val.t().is_contiguous() else f"{{{', '.join(map(str, val.stride()))}}}")


def _shorthand(node: fx.Node, names: dict[fx.Node, str]) -> str | None:
    if node.op != "call_function":
        return None
    if node.target is aten.permute.default and list(node.args[1]) == [1, 0]:
        inner = names[node.args[0]]
        return inner.removesuffix(".T") if inner.endswith(".T") else f"{inner}.T"
    if node.target is aten.alias.default:
        return names[node.args[0]]
    if node.target is operator.getitem:
        return f"{names[node.args[0]]}[{node.args[1]}]"
    return None


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    left = f"{names[node]}: {describe(node.meta['val'])}"
    if node.op == "placeholder":
        return left
    arguments = [_text(item, names) for item in node.args]
    for key, item in node.kwargs.items():
        if item not in (None, False) and key not in SEEN_IN_THE_VALUE:
            arguments.append(key.removeprefix("use_") if item is True else f"{key}={_text(item, names)}")
    return f"{left} = {op_name(node)}({', '.join(arguments)})"


def _text(item: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(_text(one, names) for one in item) + "]"
    if isinstance(item, fx.Node):
        return names[item]
    return DTYPES.get(item, str(item)) if isinstance(item, torch.dtype) else str(item)


def _random(val: Any, generator: torch.Generator) -> Any:
    if not isinstance(val, torch.Tensor):
        return int(val.node.hint) if isinstance(val, torch.SymInt) else val
    shape = [int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in val.shape]
    if not val.dtype.is_floating_point:
        return torch.zeros(shape, dtype=val.dtype)
    return torch.randn(shape, generator=generator).to(val.dtype)
