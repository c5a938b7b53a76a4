"""Draw thousands of sequences of calls and compare each call with stateless FP8: is a number lost in silence?

    python benchmarks/sequences.py --sequences 2000 --compiled 24 --seed 0

Most sequences run on interpreted graphs, which have the numerics of compiled ones, some on compiled code. The exit code
is 1 if a tensor was worse than stateless FP8 by more than 2 dB and the engine said nothing, or if a saturation lasted.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import time
from pathlib import Path
from typing import Any, Callable

import hypothesis
import torch

import fp8_compile

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("fuzz", "support")]
from plans import Plan, Subjects, plans  # noqa: E402
from sequence_run import Finding  # noqa: E402
from uncompiled import UncompiledBackend  # noqa: E402

RECOMPILING_SHARE = 0.02  # of sequences that compile again on their way, which takes seconds
TARGETS = ("cpu", "cuda:90")  # their graphs differ in how first passes and weights are scaled
COMPILED_MODELS = ("NormMlp", "RawAcrossBreak", "CheckpointOutside")  # each takes a minute to compile
PROGRESS_SECONDS = 30


@dataclasses.dataclass
class Tally:
    """What was seen in the sequences of one kind."""

    name: str
    sequences: int = 0
    calls: int = 0
    tensors: int = 0
    said: list[Finding] = dataclasses.field(default_factory=list)
    failed: list[tuple[Plan, Finding]] = dataclasses.field(default_factory=list)
    raised: list[tuple[Plan, Exception]] = dataclasses.field(default_factory=list)

    def run(self, plan: Plan, subjects: Subjects) -> None:
        self.sequences += 1
        try:
            run = subjects.run(plan)
        except Exception as error:  # whatever the engine raises is a failure to list, not the end of the search
            self.raised.append((plan, error))
            return
        self.calls, self.tensors = self.calls + run.calls, self.tensors + run.tensors
        self.said += [finding for finding in run.findings if not finding.is_failure]
        self.failed += [(plan, finding) for finding in run.findings if finding.is_failure]

    @property
    def failures(self) -> int:
        return len(self.failed) + len(self.raised)

    def row(self) -> list[str]:
        unexplained = max((finding.gap.size for _, finding in self.failed), default=0.0)
        explained = max(self.said, key=lambda finding: finding.gap.size, default=None)
        lasting = sum(finding.lasting for _, finding in self.failed)
        counts = (self.sequences, self.calls, self.tensors, len(self.failed) - lasting, lasting, len(self.raised))
        numbers = [f"{number:,}" for number in counts]
        return [self.name, *numbers, f"{unexplained:.1f}", f"{explained.gap.size if explained else 0:.1f}"]


WORST = ["worst of these, dB", "worst explained, dB"]
HEADER = ["", "sequences", "calls", "tensors", "unexplained", "lasting", "raised", *WORST]


def search(tally: Tally, strategy: Any, count: int, seed: int, backend: Callable[[], Any]) -> Tally:
    """Run ``count`` drawn plans, without stopping at a failure."""
    subjects, last = Subjects(backend), time.monotonic()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max(count, 1),
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def run(plan: Plan) -> None:
        nonlocal last
        tally.run(plan, subjects)
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            print(f"{tally.name}: {tally.sequences} of {count} sequences, {tally.failures} unexplained", flush=True)

    if count:
        run()
    return tally


def describe(tally: Tally) -> None:
    """The shortest sequence of each model that failed, and the worst gap that was explained."""
    shortest: dict[str, tuple[Plan, Any]] = {}
    for plan, failure in [*tally.failed, *tally.raised]:
        if plan.model not in shortest or len(plan.operations) < len(shortest[plan.model][0].operations):
            shortest[plan.model] = plan, failure
    for plan, failure in shortest.values():
        what = f"{type(failure).__name__}: {failure}" if isinstance(failure, Exception) else failure
        print(f"\n{tally.name}, failed: {what}\n  in {plan}")
    if tally.said:
        print(f"\n{tally.name}, worst explained: {max(tally.said, key=lambda finding: finding.gap.size)}")


def print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *cells in rows:
        print("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=2000, help="on interpreted graphs")
    parser.add_argument("--compiled", type=int, default=24, help="on compiled code")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fp8_compile").addHandler(logging.NullHandler())  # what it warns of is counted here
    recompiling = round(chosen.sequences * RECOMPILING_SHARE)
    interpreted, seed = chosen.sequences - recompiling, chosen.seed
    tallies = [
        search(Tally("interpreted"), plans(targets=TARGETS), interpreted, seed, UncompiledBackend),
        search(Tally("recompiling"), plans(targets=TARGETS, recompiling=True), recompiling, seed, UncompiledBackend),
        search(Tally("compiled"), plans(COMPILED_MODELS), chosen.compiled, seed, fp8_compile.Backend),
    ]
    for tally in tallies:
        describe(tally)
    print()
    print_table([HEADER, *(tally.row() for tally in tallies)])
    return int(any(tally.failures for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
