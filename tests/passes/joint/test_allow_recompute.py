"""Operands of backward gemms that the partitioner may save or make again."""

from __future__ import annotations

import torch
from graph_text import op_name, ops
from joint_graph import apply, assert_same_results, copy_graph, joint_graph, make, random_inputs, run_passes
from torch import nn

from fp8_compile.passes.joint.allow_recompute import ForgetCopies


def test_backward_gemms_read_copies_until_they_are_forgotten() -> None:
    linear = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    joint = joint_graph(linear, torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True))
    *_, before, after = run_passes(joint, make("cuda:100"))
    assert (after.name, after.changes) == ("ReadAgain", 2)
    assert ops(after.graph)["bitwise_or"] == 4 and "bitwise_or" not in ops(before.graph)
    forgotten = copy_graph(after.graph)
    assert apply(ForgetCopies(), forgotten) == 4
    assert ops(forgotten) == ops(before.graph)
    for graph in (after.graph, forgotten):
        assert_same_results(before.graph, graph, random_inputs(before.graph))
    (output,) = [node for node in after.graph.nodes if op_name(node) == "_scaled_mm"]
    assert all(op_name(one) != "bitcast" for one in output.args[:2]), "forward reads q itself"


def test_gpus_that_want_one_layout_have_no_such_pass() -> None:
    joint = joint_graph(nn.Linear(32, 64, bias=False), torch.randn(16, 32, requires_grad=True))
    assert "ReadAgain" not in [step.name for step in run_passes(joint, make("cuda:90"))]
