"""Copies of FP8 bytes in a GPU's layout: plain ops while the graph is split, then one op each."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graph_text import op_name, ops, render
from joint_graph import Split, apply, assert_gpu_accepts, assert_same_results, copy_graph, random_inputs, split
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from fp8_compile.passes.graph.emit import emit
from fp8_compile.passes.graph.relayouts import emit_relayout
from fp8_compile.passes.split.relayout_bytes import RelayoutBytes

aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def halves(width: int, hidden: int, tokens: int, *, dynamic: bool = False) -> Split:
    x = torch.randn(2, tokens, width, requires_grad=True)
    return split(Mlp(width, hidden), x, target="cuda:90", dynamic=dynamic)


def after_split(graph: fx.Graph) -> tuple[fx.Graph, int]:
    done = copy_graph(graph)
    return done, apply(RelayoutBytes(), done)


@pytest.mark.parametrize(
    "width, hidden, tokens, dynamic",
    [(32, 64, 8, False), (100, 120, 5, False), (32, 64, 5, True), (100, 120, 8, True)],
    ids=["round sizes", "padded sizes", "symbolic tokens", "symbolic and padded"],
)
def test_every_chain_becomes_one_op_with_the_same_bytes(width: int, hidden: int, tokens: int, dynamic: bool) -> None:
    made = halves(width, hidden, tokens, dynamic=dynamic)
    odd = width % 16 != 0
    # Backward reads six operands along another direction than they are stored in; odd sizes pad all operands of all
    # gemms.
    expected = {"forward": 4 if odd else 0, "backward": 8 if odd else 6}
    for name, graph in (("forward", made.forward), ("backward", made.backward)):
        after, changes = after_split(graph)
        assert (name, changes, ops(after).get("relayout", 0)) == (name, expected[name], expected[name])
        assert not {"bitcast", "clone", "pad", "sym_size", "mod"} & set(ops(after))
        assert_same_results(graph, after, random_inputs(graph))
        if not dynamic:
            assert assert_gpu_accepts(after) == assert_gpu_accepts(graph)


def test_golden_of_the_gemms_of_a_backward_graph() -> None:
    after, _ = after_split(halves(32, 64, 4).backward)
    kept = ("relayout", "_scaled_mm")
    expecttest.assert_expected_inline(render(after, lambda node: op_name(node) in kept), """\
relayout: e5m2[32, 16] = relayout(to, True, 1, 16, False)
relayout_1: e4m3[64, 16] = relayout(convert_element_type_default_2, True, 1, 16, False)
_scaled_mm: f32[32, 64] = _scaled_mm(relayout, relayout_1.T, add, add_tensor_2)
relayout_2: e4m3[64, 32] = relayout(to_1, True, 1, 1, False)
_scaled_mm_1: f32[8, 64] = _scaled_mm(to, relayout_2.T, add, add_tensor_3)
relayout_3: e5m2[64, 16] = relayout(to_2, True, 1, 16, False)
relayout_4: e4m3[32, 16] = relayout(convert_element_type_default, True, 1, 16, False)
_scaled_mm_2: f32[64, 32] = _scaled_mm(relayout_3, relayout_4.T, add_1, add_tensor)
relayout_5: e4m3[32, 64] = relayout(to_3, True, 1, 1, False)
_scaled_mm_3: f32[8, 32] = _scaled_mm(to_2, relayout_5.T, add_1, add_tensor_1)
return _scaled_mm_2, view_3, _scaled_mm
""")


def test_chains_that_share_their_first_ops_stay_two_copies() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    q.meta["val"] = FakeTensorMode().from_tensor(torch.empty(5, 24, dtype=E4M3))
    first = emit_relayout(graph, q, True, 1, 16, like=q)
    second = emit_relayout(graph, q, True, 16, 16, like=q)
    bitcasts = [node for node in graph.nodes if op_name(node) == "bitcast" and node.args[0] is q]
    bitcasts[1].replace_all_uses_with(bitcasts[0])  # what ShareQuantizes does
    graph.erase_node(bitcasts[1])
    graph.output([first, second])
    after, changes = after_split(graph)
    assert (changes, ops(after)) == (2, {"relayout": 2})
    assert [node.args[1:] for node in after.nodes if op_name(node) == "relayout"] == [
        (True, 1, 16, False),
        (True, 16, 16, False),
    ]
    assert_same_results(graph, after, [torch.randn(5, 24).to(E4M3)])


def test_the_users_own_copies_of_bytes_are_left_alone() -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    q.meta["val"] = FakeTensorMode().from_tensor(torch.empty(16, 32, dtype=E4M3))
    moved = emit(graph, aten.view.dtype, q, torch.uint8, like=q)
    moved = emit(graph, aten.permute.default, moved, [1, 0], like=q)
    moved = emit(graph, aten.clone.default, moved, like=q, memory_format=torch.contiguous_format)
    graph.output([emit(graph, aten.view.dtype, moved, E4M3, like=q)])
    before = render(graph)
    assert (after_split(graph)[1], render(after_split(graph)[0])) == (0, before)
