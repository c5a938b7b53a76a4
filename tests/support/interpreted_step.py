"""Run the code that Inductor writes for a GPU that is not there: on CPU tensors, its kernels in Triton's interpreter.

    with compiled_for_gpu(LARGE_BLOCKS) as graphs:
        compiled = torch.compile(model, backend="fp8", options={"target": "cuda:90"})
        compiled(x).sum().backward()                    the model trains, by the generated code
    forward, backward = graphs
    forward.run(inputs, SMALL_BLOCKS)                   the generated code again: other inputs, other blocks
    forward.expected(inputs)                            the graph that it was generated from, in plain PyTorch

The source is executed as Inductor wrote it: its allocations, reuses of buffers, views, order of launches and arguments.
Grids and block sizes come from Inductor's own heuristics, or are set. Memory is hostile: what a kernel has not written
and what a mask leaves out is NaN, and a write beyond a buffer is an error. ``_scaled_mm`` is the CPU's, or with many
scales its definition, after a check of what a GPU's would refuse. Transcendental functions are PyTorch's, so that they
agree with the reference.

Not seen here: races inside a block, contraction of products and sums, the hardware's own approximations.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import pathlib
import tempfile
import types
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import absent_gpu
import torch
from hostile_interpreter import UNWRITTEN, hostile_interpreter
from interpreted import Twin
from joint_graph import check_accepted, reference_scaled_mm
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V
from torch.fx.node import map_aggregate
from triton.runtime import interpreter

from fp8_compile.kernels.gpu import cublaslt_mm
from fp8_compile.passes.split.add_in_gemm import AddInGemm

GUARD = 1 << 16  # bytes on each side of a buffer: a block without a mask would not reach beyond
GUARD_BYTE = 0xA5


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How kernels are launched. ``sizes`` of blocks, by name; None: what Inductor's heuristics try first."""

    sizes: tuple[tuple[str, int], ...] | None = None
    backwards: bool = False  # the last program of a grid first


HEURISTIC_BLOCKS = Blocks()
SMALL_BLOCKS = Blocks((("XBLOCK", 32), ("YBLOCK", 16), ("R0_BLOCK", 32)), backwards=True)
LARGE_BLOCKS = Blocks((("XBLOCK", 256), ("YBLOCK", 64), ("R0_BLOCK", 128)))  # many a tensor ends in the first one


# ---- a graph and its code -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class GeneratedGraph:
    """One graph that Inductor compiled: the Python source that it wrote, and the graph before our last passes, but with
    additions in gemms, whose results are rounded once and not twice."""

    source: str
    is_backward: bool
    graph: fx.GraphModule
    capability: int
    calls: list[list[Any]] = dataclasses.field(default_factory=list)  # copies of the inputs of each call

    def run(self, inputs: Sequence[Any], blocks: Blocks) -> list[Any]:
        """Execute the source; inputs that it writes to are changed."""
        with contextlib.ExitStack() as stack:
            memory = GuardedMemory()
            checked = functools.partial(_checked_cublaslt_mm, self.capability // 10 == 10, cublaslt_mm.GEMM.reference)
            modules = [kernel.module for kernel in self._kernels.values()]
            stack.enter_context(hostile_interpreter(modules, backwards=blocks.backwards))
            stack.enter_context(mock.patch.object(torch.cuda, "_DeviceGuard", contextlib.nullcontext))
            stack.enter_context(mock.patch.object(torch.cuda, "set_device", lambda device: None))
            stack.enter_context(mock.patch.object(cublaslt_mm.GEMM, "reference", checked))
            launched = {name: _Launched(kernel.heuristics, blocks) for name, kernel in self._kernels.items()}
            call = _execute(self.source, launched, memory.empty_strided)["call"]
            outputs = list(call(list(inputs)))
            memory.check()
        return outputs

    def expected(self, inputs: Sequence[Any], *, rounded: bool = False) -> list[Any]:
        """What the graph gives in plain PyTorch; inputs that it writes to are changed.

        ``rounded``: each operation to its dtype, as the graph says, and not only what goes to memory.
        """
        return list((fx.Interpreter if rounded else _BetweenMemoryAndMemory)(self.graph).run(*inputs))

    def state(self) -> list[int]:
        """Which inputs the graph writes to."""
        copies = self.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        return sorted(self.placeholders().index(node.args[0].name) for node in copies)

    @functools.cached_property
    def _kernels(self) -> dict[str, _Kernel]:
        return {name: _load(name, text) for name, text in _kernel_texts(self.source).items()}

    def placeholders(self) -> list[str]:
        return [node.name for node in self.graph.graph.find_nodes(op="placeholder")]

    def output_names(self) -> list[str]:
        return [str(one) for one in self.graph.graph.output_node().args[0]]


class _BetweenMemoryAndMemory(fx.Interpreter):
    """Computes as Inductor's kernels do: in FP32 from what is in memory to what goes there, with no roundings between.

    In memory are the graph's inputs and outputs, the results of gemms and what they add. Sums of squares are taken in
    two passes.
    """

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(node)
        if node.target is cublaslt_mm.cublaslt_mm_op:
            pairs = zip(args, node.args)
            args = tuple(one.to(of.meta["val"].dtype) if isinstance(one, Tensor) else one for one, of in pairs)
        return args, kwargs

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is cublaslt_mm.cublaslt_mm_op:
            return super().call_function(target, args, kwargs)
        if target is torch.ops.aten._scaled_mm.default:
            return _product(*args, **kwargs)
        args = map_aggregate(args, _wide)
        if target is torch.ops.prims.convert_element_type.default and args[1] is torch.bfloat16:
            return args[0]
        if target is torch.ops.aten.var_mean.correction:
            mean = args[0].mean(args[1], keepdim=True)
            return (args[0] - mean).square().mean(args[1], keepdim=True), mean
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        nodes = self.module.graph.output_node().args[0]
        return [one.to(node.meta["val"].dtype) if isinstance(one, Tensor) else one for node, one in zip(nodes, args[0])]


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


@contextlib.contextmanager
def compiled_for_gpu(blocks: Blocks, capability: int = 90) -> Iterator[list[GeneratedGraph]]:
    """Inside, ``torch.compile`` writes code for that GPU, and what it compiles runs interpreted on CPU tensors."""
    graphs: list[GeneratedGraph] = []
    compiler = compile_fx._InProcessFxCompile
    original = compiler.codegen_and_compile

    def codegen_and_compile(scheme: Any, gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        reference = _copy_of_graph(gm)  # still on the CPU
        AddInGemm().run(reference.graph)
        reference.recompile()
        moved = absent_gpu.move_to_gpu(gm, inputs)

        def compile_to_module(graph: GraphLowering) -> types.SimpleNamespace:
            with V.set_graph_handler(graph):
                code, _ = graph.codegen()
            graphs.append(GeneratedGraph(code.value, bool(graph.is_backward), reference, capability))
            return types.SimpleNamespace(call=functools.partial(_call, graphs[-1], blocks), runner=None, __file__="")

        with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
            return original(scheme, gm, moved, *args, **kwargs)

    with (
        absent_gpu.absent_gpu(capability),
        fresh_cache(),
        mock.patch.object(compiler, "codegen_and_compile", codegen_and_compile),
        inductor_config.patch(compile_threads=1, cpp_wrapper=False, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        torch._dynamo.reset()
        yield graphs


def _call(graph: GeneratedGraph, blocks: Blocks, inputs: list[Any]) -> list[Any]:
    """What the compiled model calls."""
    arguments = list(inputs)
    inputs.clear()
    graph.calls.append([copy(one) for one in arguments])
    return graph.run(arguments, blocks)


def copy(value: Any) -> Any:
    """A copy with the same strides: of a tensor with gaps between its rows, ``clone`` makes one without."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value.detach())


def _copy_of_graph(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


# ---- memory ---------------------------------------------------------------------------------------------------------


class GuardedMemory:
    """Buffers that hold NaN until they are written, between guards that nobody may write to."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Tensor, int]] = []

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if all(size) else 0
        used = elements * dtype.itemsize
        raw = torch.full((GUARD + used + GUARD + -used % GUARD,), GUARD_BYTE, dtype=torch.uint8)
        raw[GUARD : GUARD + used] = UNWRITTEN
        self._blocks.append((raw, used))
        typed = raw.view(dtype)
        return typed.as_strided(size, stride, GUARD // dtype.itemsize)

    def copy(self, value: Any) -> Any:
        """A tensor's values in guarded memory, with its strides."""
        if not isinstance(value, Tensor):
            return value
        return self.empty_strided(value.size(), value.stride(), value.dtype).copy_(value.detach())

    def check(self) -> None:
        for raw, used in self._blocks:
            outside = torch.cat([raw[:GUARD], raw[GUARD + used :]])
            assert (outside == GUARD_BYTE).all(), "a kernel wrote beyond its buffer"


# ---- the source -----------------------------------------------------------------------------------------------------


def _execute(source: str, kernels: dict[str, Any], empty_strided: Callable[..., Tensor]) -> dict[str, Any]:
    """Run the module; the names in ``ours`` are defined by us, not by its imports and assignments."""
    compiled = types.SimpleNamespace(triton=lambda *args, **kwargs: None, wait=lambda names: names.update(kernels))
    ours = {
        "async_compile": compiled,
        "empty_strided_cuda": empty_strided,
        "get_raw_stream": lambda device: 0,
        "extern_kernels": _ExternKernels(),
    }
    tree = ast.parse(source)
    tree.body = [statement for statement in tree.body if not _names(statement) & ours.keys()]
    namespace = {"__name__": "generated", **ours}
    exec(compile(tree, "<generated code>", "exec"), namespace)
    return namespace


def _names(statement: ast.stmt) -> set[str]:
    """What a statement of a module imports or assigns."""
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


class _ExternKernels:
    """What Inductor calls and does not write."""

    def __getattr__(self, name: str) -> Any:
        return getattr(extern_kernels, name)

    @staticmethod
    def _scaled_mm(left: Tensor, right: Tensor, *scales_and_bias: Tensor, out: Tensor, **options: Any) -> None:
        _check_gemm(left, right)
        check_accepted(left, right, *scales_and_bias[:2], **options)
        out.copy_(_product(left, right, *scales_and_bias, **options))


def _product(left: Tensor, right: Tensor, *scales_and_bias: Tensor, **options: Any) -> Tensor:
    one_scale_each = all(scale.numel() == 1 for scale in scales_and_bias[:2])
    return (torch._scaled_mm if one_scale_each else reference_scaled_mm)(left, right, *scales_and_bias, **options)


def _checked_cublaslt_mm(any_layout: bool, reference: Any, given: cublaslt_mm.Operands) -> Tensor:
    _check_gemm(given.left, given.right, any_layout=any_layout)
    assert all(one.dtype is torch.float32 and one.numel() == 1 for one in (given.scale_left, given.scale_right))
    if (added := given.added) is not None:
        assert added.stride(1) == 1 and added.stride(0) % 8 == 0 and added.data_ptr() % 16 == 0
    return reference(given)


def _check_gemm(left: Tensor, right: Tensor, *, any_layout: bool = False) -> None:
    """What cuBLASLt asks of the operands."""
    for side, k_dim in ((left, 1), (right, 0)):
        dense = k_dim if side.stride(k_dim) == 1 or not any_layout else 1 - k_dim
        assert side.stride(dense) == 1 and side.stride(1 - dense) >= side.shape[dense], "no dimension is contiguous"
        assert side.stride(1 - dense) % 16 == side.data_ptr() % 16 == 0, "not aligned"
    assert left.shape[1] % 16 == 0 and right.shape[1] % 16 == 0, "not multiples of 16"
    assert not left.dtype == right.dtype == torch.float8_e5m2, "E5M2 by E5M2"


def _kernel_texts(source: str) -> dict[str, str]:
    """Variable -> the text that it is made of: ``variable = async_compile.triton('name', '''text''', ...)``."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("async_compile."):
            assert ast.unparse(node.value.func) == "async_compile.triton", ast.unparse(node.value.func)
            found[node.targets[0].id] = node.value.args[1].value
    return found


@dataclasses.dataclass(frozen=True)
class _Kernel:
    heuristics: CachingAutotuner  # around the kernel itself
    module: types.ModuleType


def _load(name: str, text: str) -> _Kernel:
    """Execute a kernel's text: a decorator of Inductor's heuristics around a ``triton.jit`` function."""
    file = pathlib.Path(tempfile.mkdtemp(dir=_folder().name)) / f"{name}.py"  # stays: the interpreter reads it, too
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(triton_helpers, "set_driver_to_gpu"):
        spec.loader.exec_module(module)
    (heuristics,) = [value for value in vars(module).values() if isinstance(value, CachingAutotuner)]
    return _Kernel(heuristics, module)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


class _Launched:
    """Stands for a kernel in the generated code."""

    def __init__(self, kernel: CachingAutotuner, blocks: Blocks) -> None:
        self.kernel, self.blocks = kernel, blocks

    def run(self, *args: Any, stream: int) -> None:
        kernel = self.kernel
        # Of an argument that is 1 Inductor makes a constant, and passes it all the same.
        names = [parameter.name for parameter in kernel.fn.params if not parameter.is_constexpr]
        names += kernel.inductor_meta.get("extra_launcher_args", ())
        assert len(names) == len(args), (names, args)
        given = dict(zip(names, args))
        constants = self._constants()
        grid = GridExpr.from_meta(kernel.inductor_meta, constants).eval_slow({**given, **constants})
        arguments = {name: value for name, value in {**constants, **given}.items() if name in kernel.fn.arg_names}
        function = Twin(kernel.fn.fn)
        interpreter.GridExecutor(function.rewrite(), function.arg_names, grid)(**arguments)

    def _constants(self) -> dict[str, Any]:
        """Values of the ``constexpr`` arguments: fixed in the code, or a configuration's."""
        fixed = dict(self.kernel.triton_meta["constants"])
        proposed = {} if self.kernel.custom_kernel else self.kernel.configs[0].kwargs
        fixed_blocks = self.kernel.heuristic_type is HeuristicType.FIXED
        wanted = {} if fixed_blocks else dict(self.blocks.sizes or ())
        return {**fixed, **{name: wanted.get(name, value) for name, value in proposed.items()}}
