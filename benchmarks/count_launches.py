"""What each kernel of a scheduled graph reads, writes and computes.

    launches_of(graph.scheduler.nodes, source)    a Launch a kernel, in the order of the generated code
    Step(launches, forward, backward)             its totals

Bytes are those of the buffers a kernel touches, each once; caches and tiles read twice are not modelled.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Sequence

from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from fp8_compile.kernels.inductor.tiles import is_tile


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel of the step: its name in the code, and what it reads and writes, each buffer once."""

    name: str
    kind: str  # "triton", "gemm" or "other": an extern call that is no gemm
    bytes: int
    flops: int = 0  # of gemms and attention
    fp8: bool = False  # a gemm of FP8 operands


@dataclasses.dataclass(frozen=True)
class Step:
    """Every launch of a training step in order, and the Python sources that Inductor wrote."""

    launches: tuple[Launch, ...]
    forward: str
    backward: str

    @property
    def triton_kernels(self) -> int:
        return self._count("triton")

    @property
    def gemms(self) -> int:
        return self._count("gemm")

    @property
    def others(self) -> int:
        return self._count("other")

    @property
    def bytes(self) -> int:
        return sum(launch.bytes for launch in self.launches)

    @property
    def gemm_bytes(self) -> int:
        return sum(launch.bytes for launch in self.launches if launch.kind == "gemm")

    @property
    def bytes_outside_gemms(self) -> int:
        return self.bytes - self.gemm_bytes

    def _count(self, kind: str) -> int:
        return sum(launch.kind == kind for launch in self.launches)


def launches_of(nodes: Sequence[BaseSchedulerNode], source: str) -> list[Launch]:
    """One launch a scheduled node, but for those that make a buffer, or name one of an extern call's results."""
    nodes = [n for n in nodes if not isinstance(n, NopKernelSchedulerNode) and not isinstance(n.node, ir.MultiOutput)]
    calls = re.findall(r"^ *(\w+)\.run\(", source, re.MULTILINE)
    in_triton = [node for node in nodes if not _extern_name(node)]
    assert len(calls) == len(in_triton), f"{len(in_triton)} nodes became {len(calls)} launches"
    names = dict(zip(in_triton, calls))
    return [_launch(node, names.get(node)) for node in nodes]


def _launch(node: BaseSchedulerNode, triton_name: str | None) -> Launch:
    size = _bytes_moved(node)
    if isinstance(node.node, ir.UserDefinedTritonKernel):
        # Inductor takes a buffer that the kernel fills as read and written.
        size -= sum(_tensor_bytes(buffer) for buffer in node.node.mutable_args)
    if triton_name and node.is_template():
        gemm = node.get_template_node()
        return Launch(triton_name, "gemm", size, *_gemm_facts(gemm, gemm.inputs[0]))
    if triton_name:
        return Launch(triton_name, "triton", size)
    name = _extern_name(node)
    if "mm" in name:
        left = node.node.inputs[1 if "addmm" in name or "baddbmm" in name else 0]
        return Launch(name, "gemm", size, *_gemm_facts(node.node, left))
    return Launch(name, "other", size, _attention_flops(node.node) if "scaled_dot_product" in name else 0)


def _bytes_moved(node: BaseSchedulerNode) -> int:
    """What a node reads and writes. Inductor takes a buffer that stores of tiles fill as read and written, and of its
    bytes counts only those of the loop: not the scales."""
    accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    for part in node.get_nodes():
        writes = [dep for dep in part.read_writes.writes if isinstance(dep, MemoryDep) and is_tile(dep.mode)]
        for dep in writes:
            (filled,) = part.node.get_mutation_names()
            accesses[filled], accesses[dep.name] = 0, _tensor_bytes(V.graph.get_buffer(filled))
    return sum(accesses.values())


def _gemm_facts(gemm: ir.IRNode, left: ir.IRNode) -> tuple[int, bool]:
    """FLOPs, and whether the operands are FP8. Of a product per group of tokens, each token is in one group."""
    if isinstance(gemm, ir.FallbackKernel):  # an operation of ours
        (gemm,) = gemm.outputs
    size = [int(one) for one in gemm.get_size()]
    in_groups = len(size) == 3 and len(left.get_size()) == 2
    return 2 * math.prod(size[in_groups:]) * int(left.get_size()[-1]), left.get_dtype().itemsize == 1


def _extern_name(node: BaseSchedulerNode) -> str | None:
    return getattr(node.node, "python_kernel_name", None)


def _attention_flops(kernel: ir.FallbackKernel) -> int:
    """Half of all pairs of positions where the attention is causal."""
    shapes = [tuple(int(size) for size in tensor.get_size()) for tensor in kernel.inputs]
    schema = kernel.op_overload._schema.arguments
    backward = schema[0].name == "grad_out"
    flops = sdpa_backward_flop_count(*shapes[:4]) if backward else sdpa_flop_count(*shapes[:3])
    values, _ = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
    causal = dict(zip((argument.name for argument in schema), values)).get("is_causal", False)
    return flops // 2 if causal else flops


def _numel(buffer: ir.IRNode) -> int:
    return math.prod(int(size) for size in buffer.get_size())


def _tensor_bytes(buffer: ir.IRNode) -> int:
    return _numel(buffer) * buffer.get_dtype().itemsize
