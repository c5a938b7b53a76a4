"""Operands of backward gemms that the partitioner may save or make again."""

from __future__ import annotations

import torch
from graph_text import op_name, ops
from joint_graph import apply, assert_same_results, copy_graph, joint_graph, make, random_inputs, run_passes
from torch import nn

from fp8_compile.passes.split.drop_recompute_copies import DropRecomputeCopies
from fp8_compile.torch_internals import patches


def test_backward_gemms_read_copies_until_they_are_dropped() -> None:
    linear = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    joint = joint_graph(linear, torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True))
    *_, before, after = run_passes(joint, make("cuda:100"))
    assert (after.name, after.changes) == ("AllowRecompute", 2)
    assert ops(after.graph)["recompute_copy"] == 4 and "recompute_copy" not in ops(before.graph)
    dropped = copy_graph(after.graph)
    assert apply(DropRecomputeCopies(), dropped) == 4
    assert ops(dropped) == ops(before.graph)
    for graph in (after.graph, dropped):
        assert_same_results(before.graph, graph, random_inputs(before.graph))
    (output,) = [node for node in after.graph.nodes if op_name(node) == "_scaled_mm"]
    assert all(op_name(one) != "recompute_copy" for one in output.args[:2]), "forward reads q itself"


def test_where_the_partitioner_can_not_be_told_what_is_cheap_copies_are_plain_ops() -> None:
    linear = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    joint = joint_graph(linear, torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True))
    with patches.without("cheap_ops"):
        *_, before, after = run_passes(joint, make("cuda:100"))
    assert ops(after.graph)["bitwise_or"] == 4 and "recompute_copy" not in ops(after.graph)
    assert_same_results(before.graph, after.graph, random_inputs(before.graph))
    assert apply(DropRecomputeCopies(), after.graph) == 4
    assert ops(after.graph) == ops(before.graph)


def test_gpus_that_want_one_layout_have_no_such_pass() -> None:
    joint = joint_graph(nn.Linear(32, 64, bias=False), torch.randn(16, 32, requires_grad=True))
    assert "AllowRecompute" not in [step.name for step in run_passes(joint, make("cuda:90"))]
