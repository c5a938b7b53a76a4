"""Drawn and fixed sequences of calls: no number is lost in silence. ``benchmarks/sequences.py`` is the long version."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from operations import Attach, Average, Batch, Forward, Look, RoundTrip, Steady, Train
from plans import Plan, Subjects, plans
from sequence_run import Finding, SequenceRun
from subject import Subject
from uncompiled import UncompiledBackend

from fp8_compile import Backend, Config

JUMP = Batch(rows=64, magnitude=300.0)


@pytest.fixture(scope="module")
def interpreted() -> Subjects:
    return Subjects(UncompiledBackend)


def silent(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings if not finding.said]


def lasting(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings if finding.lasting]


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(plans(("Chain",)))
def test_no_number_is_lost_in_silence_on_a_cpu(interpreted: Subjects, plan: Plan) -> None:
    assert silent(interpreted.run(plan).findings) == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(plans(("UsedTwice",), targets=("cuda:90",)))
def test_no_number_is_lost_in_silence_for_a_gpu(interpreted: Subjects, plan: Plan) -> None:
    assert silent(interpreted.run(plan).findings) == []


@pytest.mark.parametrize("mode", ["no_grad", "grad"])
def test_average_weights_are_those_that_are_multiplied(interpreted: Subjects, mode: str) -> None:
    """Put in through ``.data``, with an optimizer attached: its copies of the weights are not to be believed."""
    average = Average(0.3, Forward(mode=mode))
    plan = Plan("UsedTwice", (Attach(), Steady((0, 0)), average, Forward(mode="grad"), Steady()), recompiling=True)
    assert silent(interpreted.run(plan).findings) == []


def test_a_graph_that_looks_first_leaves_others_their_scales(interpreted: Subjects) -> None:
    plan = Plan("OptionalBranch", (Steady((0, 0, 0, 1, 0)),), target="cuda:90")
    assert silent(interpreted.run(plan).findings) == []


def test_a_first_batch_of_another_size_leaves_later_ones_their_scales(interpreted: Subjects) -> None:
    plan = Plan("UsedTwice", (Train((Batch(rows=33),)), Steady((0, 0))), target="cuda:90")
    assert silent(interpreted.run(plan).findings) == []


def test_a_jump_is_over_after_one_step(interpreted: Subjects) -> None:
    plan = Plan("Chain", (Steady((0, 0)), Train((JUMP,), again=True)))
    assert lasting(interpreted.run(plan).findings) == []


def test_a_jump_is_over_after_one_step_across_a_graph_break(interpreted: Subjects) -> None:
    plan = Plan("RawAcrossBreak", (Steady((0, 0)), Train((JUMP,), again=True)))
    assert lasting(interpreted.run(plan).findings) == []


def test_a_jump_is_over_after_one_step_of_several_micro_batches(interpreted: Subjects) -> None:
    plan = Plan("Chain", (Steady((0, 0)), Train((JUMP, Batch()), again=True)))
    assert lasting(interpreted.run(plan).findings) == []


@pytest.mark.parametrize("model", ["UsedTwice", "RawAcrossBreak"])
def test_compiled_code_loses_no_number_in_silence(model: str) -> None:
    """Of one batch size, so that there are two graphs to compile and no more."""
    jump = Train((Batch(magnitude=300.0), Batch()), together=True)
    calls = (Steady((0, 0)), Forward(), Look(), jump, RoundTrip(), Average(0.3, Forward()), Steady((0, 0)))
    assert silent(Subjects(Backend).run(Plan(model, calls)).findings) == []


def test_results_that_are_silently_wrong_would_be_found() -> None:
    subject = Subject("UsedTwice", UncompiledBackend(Config()))
    (entry,) = subject.entries
    subject.entries = [lambda x: entry(x) * 1.2]
    assert any(finding.gap.tensor == "output" for finding in SequenceRun(subject).run((Steady(),)) if not finding.said)


def test_a_model_that_does_not_run_in_fp8_would_be_found() -> None:
    with pytest.raises(AssertionError, match="not computed in FP8"):
        SequenceRun(Subject("UsedTwice", "eager")).run((Steady(),))


def test_sequences_are_the_same_each_time(interpreted: Subjects) -> None:
    """A subject that many sequences have used is as good as new."""
    plan = Plan("Chain", (Steady((0, 0)), Train((JUMP, Batch(1)), input_grad=True)), adam=True)
    first, second = (interpreted.run(plan) for _ in range(2))
    assert first.findings == second.findings and first.findings
    assert torch.equal(*(torch.tensor([finding.gap.size for finding in run.findings]) for run in (first, second)))
