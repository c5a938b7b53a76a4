"""Let FP8 gemms of NVIDIA GPUs add what is added to their results: residuals, gradients of shared inputs."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ..graph.arguments import input_of
from ..graph.emit import emit, value
from ..graph.fp8_gemm import fp8_gemm
from ..graph.producers import op_tags
from ..graph.views import RESHAPES, is_call_of, root_of
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

FUSED_WITH_USERS = (torch.Tag.pointwise, torch.Tag.reduction)


class AddInGemm(GraphPass):
    """Replace a gemm and the addition that alone reads its result, once the graph is split.

    Before:  y = add(x, view(_scaled_mm(qa, qb, sa, sb, bias, out_dtype=bf16), [B, T, N]))
    After:   y = view(fp8_compile.cublaslt_mm(qa, qb, sa, sb, view(x, [-1, N]), bias, bf16), [B, T, N])

    Only where x is in memory anyway: were it computed in the addition's own kernel, it would have to be written for
    the gemm to read it. And only with one scale per tensor or in MXFP8: rowwise and blockwise gemms of torch are other
    kernels.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        order = {node: position for position, node in enumerate(graph.nodes)}
        changed = 0
        for add in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            sides = [side for side in add.args if isinstance(side, fx.Node)]
            if len(sides) != 2 or sides[0] is sides[1] or add.kwargs.get("alpha", 1) != 1:
                continue
            chains = [(chain, added) for side, added in (sides, sides[::-1]) if (chain := _gemm_before(side))]
            fitting = [(chain, added) for chain, added in chains if _can_add(add, chain, added)]
            if fitting:
                # Of two gemms the later one adds: by then the other's result is there.
                self._replace(graph, add, *max(fitting, key=lambda pair: order[pair[0][-1]]))
                changed += 1
        return PassReport(changed, "additions made in FP8 gemms")

    def _replace(self, graph: fx.Graph, add: fx.Node, chain: list[fx.Node], added: fx.Node) -> None:
        gemm = chain[-1]
        with graph.inserting_before(add):
            flat = emit(graph, aten.view.default, added, [-1, value(gemm).shape[1]], like=gemm)
            asked = fp8_gemm(gemm)
            assert asked is not None, gemm.format_node()
            result = dataclasses.replace(asked, added=flat).emit(graph, like=gemm, by_cublaslt=True)
            for view in reversed(chain[:-1]):
                result = emit(graph, aten.view.default, result, *view.args[1:], like=view)
        add.replace_all_uses_with(result)
        for node in (add, *chain):
            graph.erase_node(node)


def _gemm_before(node: fx.Node) -> list[fx.Node]:
    """The views between an addition and an FP8 gemm that adds nothing yet, and the gemm; an empty list where another
    node reads any of them."""
    chain = [node]
    while is_call_of(chain[-1], RESHAPES):
        chain.append(input_of(chain[-1]))
    gemm = fp8_gemm(chain[-1])
    free = gemm is not None and gemm.can_add and gemm.added is None
    return chain if free and all(len(one.users) == 1 for one in chain) else []


def _can_add(add: fx.Node, chain: list[fx.Node], added: fx.Node) -> bool:
    result, other = value(chain[0]), value(added)
    same = isinstance(other, torch.Tensor) and other.shape == result.shape == value(add).shape
    if not same or not other.dtype == result.dtype == value(add).dtype or not other.is_contiguous():
        return False
    return _is_in_memory(added)


def _is_in_memory(node: fx.Node) -> bool:
    """True for a tensor that is written even if no gemm asks for it."""
    tags = op_tags(root_of(node))
    return len(node.users) > 1 or not any(tag in tags for tag in FUSED_WITH_USERS)
