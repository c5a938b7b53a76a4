"""Carry out a sequence of operations on a subject and compare every call with stateless FP8."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterable

import torch
from calls import Call, forward, train
from comparison import ALLOWED_DB, Gap, Tensors, find_gaps
from lost_numbers import Warnings, counted
from operations import (
    Attach,
    Average,
    ForgetCode,
    Forward,
    LoadWeights,
    Look,
    Operation,
    Resume,
    RoundTrip,
    Save,
    Steady,
    Train,
)
from stateless_fp8 import StatelessFp8
from subject import Subject
from torch import nn
from zoo import Entry

from fp8_compile.scaling.find_state import states_within

Run = Callable[[Entry, nn.Module, list[Call]], list[Any]]
LARGEST_JUMP = 1024.0  # margin and room of E4M3, 2**8, and the margin that a saturated tensor has filled, 2**2


@dataclasses.dataclass(frozen=True)
class Finding:
    """A call with a gap. ``said``: what the engine said of numbers that this call lost. ``lasting``: it was saturated
    before on the same data, and has not recovered."""

    subject: str
    position: int  # in the sequence
    operation: Operation
    gap: Gap
    said: tuple[str, ...]
    lasting: bool = False

    @property
    def is_failure(self) -> bool:
        return not self.said or self.lasting

    def __str__(self) -> str:
        said = ("again: " if self.lasting else "") + (", ".join(self.said) or "nothing was said")
        return f"{self.subject}, operation {self.position}, {self.gap} ({said})\n    {self.operation}"


class SequenceRun:
    """The calls of one sequence so far, and what was found."""

    def __init__(self, subject: Subject, *, adam: bool = False) -> None:
        self.subject = subject
        self.findings: list[Finding] = []
        self.calls = self.tensors = 0
        self._position = self._draws = 0
        self._amaxes: list[float] = []  # of the inputs that were trained on
        self._weights_replaced = False
        subject.restart(adam=adam)

    def run(self, operations: Iterable[Operation]) -> list[Finding]:
        for self._position, operation in enumerate(operations):
            self._carry_out(operation)
        return self.findings

    def _carry_out(self, operation: Operation) -> None:
        subject = self.subject
        match operation:
            case Train():
                self._train(operation)
            case Steady(entries):
                for entry in entries:
                    self._train(Train(entry=entry))
            case Forward():
                self._forward(operation, operation)
            case Average(factor, evaluation):
                own = subject.average(factor)
                if evaluation is not None:
                    self._forward(evaluation, operation)
                subject.put(own)
            case LoadWeights(factor):
                subject.load_weights(subject.first_weights, factor)
                self._weights_replaced = True
            case RoundTrip():
                subject.load_scaling(subject.scaling())
            case Save():
                subject.save()
            case Resume():
                subject.resume()
                self._weights_replaced = True
            case Look():
                for state in states_within(subject.model).values():
                    state.stats()
            case Attach():
                subject.toggle_attached()
            case ForgetCode():
                torch.compiler.reset()

    def _train(self, operation: Train) -> None:
        calls = [Call.draw(batch, self._seed(), operation.input_grad) for batch in operation.batches]
        self._amaxes += [amax for call in calls if (amax := call.x.abs().max().item()) > 0]
        findings = self._step(operation, calls)
        if not operation.again:
            return
        # Room lasts for two passes of the saturated tensor, which calls of other magnitudes may use up.
        in_time = len(operation.batches) <= 2 and self.subject.name != "RepeatedBlock"
        has_to_recover = in_time and self._has_to_recover and any(_jumped(finding.said) for finding in findings)
        again = self._step(operation, calls, excused=not has_to_recover)
        if has_to_recover:
            self.findings[len(self.findings) - len(again) :] = [
                dataclasses.replace(one, lasting=_jumped(one.said)) for one in again
            ]

    @property
    def _has_to_recover(self) -> bool:
        """Whether a jump was one that has to be over after a step. After other weights, ``reset()`` is asked for."""
        largest, least = max(self._amaxes, default=0), min(self._amaxes, default=0)
        return not self._weights_replaced and largest <= LARGEST_JUMP * least

    def _step(self, operation: Train, calls: list[Call], *, excused: bool = True) -> list[Finding]:
        """One step of the optimizer. What was said can be told for each micro-batch, unless they run together."""
        gradients, findings = [], []
        for group in [calls] if operation.together else [[call] for call in calls]:
            results, found = self._compare(operation, operation.entry, group, train, excused=excused)
            gradients += results
            findings += found
        self.subject.step(gradients)
        return findings

    def _forward(self, operation: Forward, within: Operation) -> None:
        def run(entry: Entry, model: nn.Module, calls: list[Call]) -> list[Tensors]:
            return [forward(entry, call, operation.mode) for call in calls]

        self._compare(within, operation.entry, [Call.draw(operation.batch, self._seed())], run)

    def _compare(
        self, operation: Operation, entry: int, calls: list[Call], run: Run, *, excused: bool = True
    ) -> tuple[list[Any], list[Finding]]:
        """The engine's results of some calls, and the gaps in them. ``excused``: where it said that it lost numbers."""
        subject = self.subject
        subject.synchronize()
        before = counted(subject.model)
        with Warnings() as warnings:
            results = run(subject.entries[entry], subject.model, calls)
        risen = counted(subject.model) - before
        said = (*sorted(risen), *warnings.messages)
        twin, findings = subject.twin_entries[entry], []
        for call, result in zip([call.double() for call in calls], results):

            def simulate(luck: torch.Generator | None, call: Call = call) -> Tensors:
                with StatelessFp8(luck):
                    return run(twin, subject.twin, [call])[0]

            exact = run(twin, subject.twin, [call])[0]
            gaps = find_gaps(result, exact, simulate, excused=excused and bool(said))
            self.calls, self.tensors = self.calls + 1, self.tensors + len(gaps)
            found = [gap for gap in gaps if gap.size > ALLOWED_DB]
            findings += [Finding(subject.name, self._position, operation, gap, said) for gap in found]
        self.findings += findings
        return results, findings

    def _seed(self) -> int:
        self._draws += 1
        return self._draws


def _jumped(said: Iterable[str]) -> bool:
    """Whether activations or gradients were saturated. Weights are a little, whenever a step makes the largest grow."""
    return any(one.endswith(" saturated") and ".weight " not in one for one in said)
