"""Ways to run one training step, compiled each by itself and stepped in turns: what ``train_cpu.py`` and
``experts_cpu.py`` compare.

Steps of all variants take turns, so that a noisy neighbour slows them alike; ratios are of medians. Compile times
are of a cold cache, after one small compile that pays for what is shared (headers, worker start). Where the time of a
step goes, and the most memory that it holds above what was there before, are from a profile of one step.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any, Sequence

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise", "fp8_compile::scaled_mm")
GEMMS += ("aten::_grouped_mm", "fp8_compile::scaled_grouped_mm", "fp8_compile::mx_mm", "fp8_compile::nvfp4_train_mm")
QUANTIZES = tuple(
    f"fp8_compile::{name}"
    for name in ("quantize_delayed", "quantize", "cast", "scales", "quantize_mx", "quantize_nvfp4", "global_scale")
)


class Variant:
    """One way to run the model: compiled once, stepped many times."""

    def __init__(self, name: str, model: nn.Module, batch: tuple[torch.Tensor, ...], **compile_options: Any) -> None:
        self.name, self.batch = name, batch
        self.model = torch.compile(model, **compile_options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.times: list[float] = []
        start = time.perf_counter()
        with fresh_cache():
            self.loss = self.step()
        self.compile_seconds = time.perf_counter() - start

    def step(self) -> float:
        loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def timed_step(self) -> None:
        start = time.perf_counter()
        self.loss = self.step()
        self.times.append(time.perf_counter() - start)

    def profile(self) -> dict[str, float]:
        """Milliseconds of gemms, quantizes and the rest, and the most megabytes held, in one step."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.step()
        own = {event.key: event.self_cpu_time_total / 1e3 for event in profile.key_averages()}
        gemm, quantize = (sum(own.get(name, 0.0) for name in names) for names in (GEMMS, QUANTIZES))
        held = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return {"gemm": gemm, "quantize": quantize, "rest": sum(own.values()) - gemm - quantize, "peak_mb": most / 1e6}

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.times)


def pay_for_what_is_shared() -> None:
    """The first compile of a process, which the first variant shall not pay for."""
    torch.compile(nn.Linear(8, 8))(torch.randn(4, 8)).sum().backward()


def compare(variants: Sequence[Variant], rounds: int, title: str, *, as_json: bool) -> None:
    """Step them in turns and print the table, or the same as JSON."""
    for _ in range(rounds):
        for variant in variants:
            variant.timed_step()
    base = variants[0]
    rows = [
        {
            "variant": variant.name,
            "step_ms": round(variant.milliseconds, 1),
            "step_ratio": round(variant.milliseconds / base.milliseconds, 3),
            "compile_s": round(variant.compile_seconds, 1),
            "compile_ratio": round(variant.compile_seconds / base.compile_seconds, 2),
            "loss": round(variant.loss, 4),
            **{name: round(number, 1) for name, number in variant.profile().items()},
        }
        for variant in variants
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{title}, {torch.get_num_threads()} threads")
    print(
        f"{'variant':30} {'step ms':>8} {'ratio':>6} {'compile s':>10} {'ratio':>6} {'loss':>8}"
        f" {'gemm ms':>8} {'quantize':>8} {'rest':>7} {'peak MB':>8}"
    )
    for row in rows:
        print(
            "{variant:30} {step_ms:8.1f} {step_ratio:6.2f} {compile_s:10.1f} {compile_ratio:6.2f} {loss:8.4f}"
            " {gemm:8.1f} {quantize:8.1f} {rest:7.1f} {peak_mb:8.1f}".format(**row)
        )
