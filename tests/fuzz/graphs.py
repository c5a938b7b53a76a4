"""Draw random models and configs and compare outputs and gradients with FP64, beside an independent simulation of FP8.

    python tests/fuzz/graphs.py --seconds 300 --seed 0          # cases seed, seed + 1, ...
    python tests/fuzz/graphs.py --case 123                      # one case, made smaller if it fails
    python tests/fuzz/graphs.py --case 123 --pieces 0,3         # with these pieces of it only

Of each case is asked:

1. that no tensor is worse than the simulation by more than ``ALLOWED_DB``, measured from its bad luck: the simulation
   rounds as the recipe says, and only how a few values fall may differ (``comparison.py`` has the reasons);
2. that results are finite where FP64's are, that each element that an Inf or NaN in the input reaches in FP64 is not
   finite, and that a clean call after it is as good as one before it;
3. that each matmul of the model has a row in the report, rewritten with the formats that its operands ask for, or
   skipped for a reason.

Graphs are interpreted, those for GPUs too; a share of the time goes to cases that Inductor compiles for the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pathlib
import sys
import time
import traceback
from typing import Iterator

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / folder) for folder in ("fuzz", "support")]
from graph_cases import OTHER_SHAPE, Case, CaseRun, NoModel, Seen  # noqa: E402
from random_models import source  # noqa: E402

COMPILED_SHARE = 0.3  # of the time


def error_of(case: Case) -> BaseException | None:
    try:
        CaseRun(case).run()
    except Exception as error:  # whatever is raised is a failure to list
        return error
    return None


def shrink(case: Case, seconds: float = 60) -> Case:
    """The case with as few pieces, calls and options as fail in the same way."""
    kind, end = type(error_of(case)), time.monotonic() + seconds

    def smaller() -> Iterator[Case]:
        for index in reversed(range(len(case.pieces))):
            yield dataclasses.replace(case, pieces=case.pieces[:index] + case.pieces[index + 1 :])
        if case.calls > 1:
            yield dataclasses.replace(case, calls=1)
        for field, plain in (("poison", None), ("autocast", False), ("layout", "contiguous"), ("dtype", torch.float32)):
            if getattr(case, field) != plain:
                yield dataclasses.replace(case, **{field: plain})
        for name in case.options:
            if name not in ("recipe", "target"):
                yield dataclasses.replace(case, options={k: v for k, v in case.options.items() if k != name})

    while time.monotonic() < end:
        found = next((one for one in smaller() if type(error_of(one)) is kind), None)
        if found is None:
            break
        case = found
    return case


def script(case: Case) -> str:
    """A program that shows the failure without the fuzzer: the model, its config, the call, and FP64 beside it."""
    run = CaseRun(case)
    options = {**case.options, **({"exclude": run.config.exclude} if run.config.exclude else {})}
    options.pop("excludes", None)
    backend = "fp8_compile.Backend" if case.compiled else "UncompiledBackend"
    number = 50 if case.poison is not None else 0
    lines = [
        "import copy, sys",
        'sys.path.append("tests/support")',
        source(run.writer),
        "import fp8_compile",
        "from uncompiled import UncompiledBackend",
        "",
        f"torch.manual_seed({case.seed})",
        f"model = Model().to({case.dtype})",
        "twin = copy.deepcopy(model).double()",
        "twin.recomputes, twin.low, twin.casts = False, torch.float64, False",
        f"backend = {backend}(fp8_compile.Config(**{options!r}))",
        "compiled = torch.compile(model, backend=backend, dynamic=False)",
        f"generator = torch.Generator().manual_seed({1000 * case.seed + number})",
        f"x = (torch.randn({run.writer.first_shape}, generator=generator) * {case.magnitude}).to({case.dtype})",
        f"other = (torch.randn({OTHER_SHAPE}, generator=generator) * {case.magnitude}).to({case.dtype})",
        f"# layout of x: {case.layout}; calls: {case.calls}; input {case.seed} % numel poisoned with: {case.poison}",
        "for one, dtype in ((compiled, x.dtype), (twin, torch.float64)):",
        f"    inputs = [tensor.to(dtype, copy=True).requires_grad_({case.input_grad}) for tensor in (x, other)]",
        f'    with torch.autocast("cpu", torch.bfloat16, enabled={case.autocast} and one is compiled):',
        "        outputs = [y for y in one(*inputs) if y.requires_grad]",
        "    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])",
        "for report in backend.reports:",
        "    print(report)",
        "for (name, p), q in zip(model.named_parameters(), twin.parameters()):",
        "    if q.grad is not None:",
        "        print(name, ((p.grad.double() - q.grad).norm() / q.grad.norm()).item())",
    ]
    return "\n".join(lines)


@dataclasses.dataclass
class Tally:
    cases: int = 0
    compiled: int = 0
    no_models: int = 0  # that eager mode does not run
    seen: Seen = dataclasses.field(default_factory=Seen)
    failures: list[tuple[Case, BaseException]] = dataclasses.field(default_factory=list)

    def add(self, case: Case) -> None:
        self.cases += 1
        self.compiled += case.compiled
        try:
            seen = CaseRun(case).run()
        except NoModel:
            self.no_models += 1
            return
        except Exception as error:  # whatever is raised is a failure to list
            self.failures.append((case, error))
            return
        for field in ("rewritten", "skipped", "tensors", "said"):
            setattr(self.seen, field, getattr(self.seen, field) + getattr(seen, field))
        self.seen.reasons.update(seen.reasons)

    def __str__(self) -> str:
        seen = self.seen
        return (
            f"{self.cases:,} cases ({self.compiled} compiled, {self.no_models} that eager mode refuses), "
            f"{seen.rewritten:,} matmuls rewritten, {seen.skipped:,} "
            f"skipped, {seen.tensors:,} tensors compared, {seen.said} worse and said so, {len(self.failures)} failures"
        )


def run_cases(seconds: float, seed: int, *, most_failures: int = 20, share: float = COMPILED_SHARE) -> Tally:
    """Cases from ``seed`` on, until the time is over."""
    tally, start, compiling = Tally(), time.monotonic(), 0.0
    last = start
    while (passed := time.monotonic() - start) < seconds and len(tally.failures) < most_failures:
        compiled = compiling < share * passed
        began = time.monotonic()
        tally.add(Case.draw(seed + tally.cases, compiled=compiled))
        compiling += (time.monotonic() - began) * compiled
        if time.monotonic() - last > 30:
            last = time.monotonic()
            print(tally, flush=True)
    return tally


def describe(case: Case, error: BaseException) -> str:
    text = "".join(traceback.format_exception(error, limit=-3))
    kept = ",".join(str(index) for index, one in enumerate(Case.draw(case.seed).pieces) if one in case.pieces)
    again = f"--case {case.seed} --pieces {kept}{' --compiled' if case.compiled else ''}"
    try:
        program = script(case)
    except Exception as broken:  # a model that can't even be built
        program = f"# no script: {broken}"
    rule = "-" * 100
    return f"{rule}\npython tests/fuzz/graphs.py {again}\n{text}\n{case}\n{rule}\n{program}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this case only")
    parser.add_argument("--pieces", help="positions of the pieces of --case to keep, with commas")
    parser.add_argument("--compiled", action="store_true", help="compile --case")
    parser.add_argument("--compiled-share", type=float, default=COMPILED_SHARE, help="of the time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fp8_compile").addHandler(logging.NullHandler())  # what it warns of is counted here
    torch._dynamo.config.recompile_limit = 64
    if options.case is not None:
        case = Case.draw(options.case, compiled=options.compiled)
        if options.pieces is not None:
            kept = [int(one) for one in options.pieces.split(",") if one]
            case = dataclasses.replace(case, pieces=tuple(case.pieces[one] for one in kept))
        tally = Tally()
        tally.add(case)
    else:
        tally = run_cases(options.seconds, options.seed, share=options.compiled_share)
    for case, error in tally.failures:
        small = shrink(case)
        print(describe(small, error_of(small) or error))
    print(tally)
    for reason, count in tally.seen.reasons.most_common(12):
        print(f"{count:>8,}  {reason}")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
