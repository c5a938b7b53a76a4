"""A paired quantize becomes launches that make what the graph reads of it, and nothing else."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graph_text import describe, ops
from joint_graph import apply
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8_compile.kernels.quantize_both import quantize_both_op
from fp8_compile.passes.graph.emit import emit, getitem
from fp8_compile.passes.split.launch_quantizes import LaunchQuantizes

E4M3 = torch.float8_e4m3fn
ROWS, TILE, SQUARE = [1, -1], [1, 128], [128, 128]
ALL = (0, 1, 2, 3)


def graph_of(block: list[int], *reads: tuple[int, ...], device: str = "cuda", symbolic: bool = False) -> fx.Graph:
    """A graph that quantizes as many matrices [200, 384] as there are ``reads``, and returns those results."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph, outputs = fx.Graph(), []
    for name in "abc"[: len(reads)]:
        x = graph.placeholder(name)
        matrix = torch.empty(200, 384, dtype=torch.bfloat16, device="meta" if device == "cuda" else device)
        sizes = [DimDynamic.DYNAMIC if symbolic else DimDynamic.STATIC, DimDynamic.STATIC]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        x.meta["val"] = mode.from_tensor(matrix, symbolic_context=context)
        if device == "cuda":
            with mode:
                x.meta["val"] = torch.empty_strided(
                    x.meta["val"].shape, x.meta["val"].stride(), dtype=torch.bfloat16, device="cuda"
                )
    for x, read in zip(list(graph.nodes), reads):
        both = emit(graph, quantize_both_op, x, E4M3, block, 16, None, like=x)
        outputs += [getitem(graph, both, index) for index in read]
    graph.output(outputs)
    return graph


def launches(graph: fx.Graph) -> str:
    """A line a launch: the kernel, its grid, its warps, what it reads and writes, its numbers."""
    lines = []
    for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation):
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        tensors = {k: v for k, v in node.kwargs["kwargs"].items() if isinstance(v.meta["val"], torch.Tensor)}
        numbers = {**constants, **{k: v.meta["val"] for k, v in node.kwargs["kwargs"].items() if k not in tensors}}
        (config,) = kernel.configs
        grid = tuple(one.meta["val"] if isinstance(one, fx.Node) else one for one in node.kwargs["grid"][0])
        lines.append(f"{kernel.fn.__name__}{grid} with {config.num_warps} warps")
        lines += [f"    {name}: {describe(one.meta['val'])}" for name, one in tensors.items()]
        lines.append("    " + ", ".join(f"{name}={number}" for name, number in numbers.items() if name.islower()))
        lines.append("    " + ", ".join(f"{name}={number}" for name, number in numbers.items() if name.isupper()))
    return "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def cuda_guard() -> None:
    torch._C._ensureCUDADeviceGuardSet()  # the no-op guard for fake tensors on a GPU that is not there


def test_golden_of_both_layouts_in_tiles() -> None:
    graph = graph_of(SQUARE, ALL)
    assert apply(LaunchQuantizes(), graph) == 1
    assert "quantize_both" not in ops(graph)
    expecttest.assert_expected_inline(launches(graph), """\
quantize_blocks_kernel(6, 1, 1) with 16 warps
    x_ptr: bf16[200, 384]
    q_ptr: e4m3[200, 384]
    q_t_ptr: e4m3[384, 208]
    dequant_ptr: f32[2, 3]{4, 1}
    dequant_t_ptr: f32[3, 2]{4, 1}
    rows=200, cols=384, row_stride=384, col_stride=1, padded=208
    LARGEST=448.0, VIA=0, SQUARE=True, ALONG_ROWS=True, ALONG_COLUMNS=True, SIZE=128
""")


@pytest.mark.parametrize("read, along", [((0, 1), (True, False)), ((2, 3), (False, True))], ids=["rows", "columns"])
def test_one_layout_of_blocks_is_made_alone(read: tuple[int, ...], along: tuple[bool, bool]) -> None:
    graph = graph_of(TILE, read)
    apply(LaunchQuantizes(), graph)
    text = launches(graph)
    assert f"ALONG_ROWS={along[0]}, ALONG_COLUMNS={along[1]}" in text
    assert ops(graph)["empty"] == 2  # nothing is allocated for the other


def test_rows_alone_take_one_kernel_and_columns_alone_two() -> None:
    graph = graph_of(ROWS, (0, 1), (2, 3))
    assert apply(LaunchQuantizes(), graph) == 2
    names = [line.partition("(")[0] for line in launches(graph).splitlines() if line[0] != " "]
    assert names == ["quantize_rows_kernel", "row_column_amax_kernel", "cast_rows_columns_kernel"]
    assert "FITS=True, BLOCK=512" in launches(graph) and launches(graph).count("ALONG_ROWS=False") == 2


def test_one_operation_fills_the_amaxes_of_all_matrices() -> None:
    graph = graph_of(ROWS, ALL, ALL)
    apply(LaunchQuantizes(), graph)
    assert ops(graph)["_foreach_mul"] == 1 and "bits_ptr: i32[584]" in launches(graph)


@pytest.mark.parametrize("block", [ROWS, TILE], ids=str)
def test_symbolic_sizes_reach_the_kernels_as_numbers_of_the_graph(block: list[int]) -> None:
    graph = graph_of(block, ALL, symbolic=True)
    assert apply(LaunchQuantizes(), graph) == 1
    text = launches(graph)
    assert "rows=s" in text and "cols=384" in text and "padded=" in text
    assert "_foreach_mul" not in ops(graph)


def test_on_a_cpu_the_op_stays() -> None:
    graph = graph_of(TILE, ALL, device="cpu")
    assert apply(LaunchQuantizes(), graph) == 0 and ops(graph)["quantize_both"] == 1
