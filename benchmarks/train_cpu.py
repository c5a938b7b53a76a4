"""A training step on the CPU: FP8 against Inductor's FP32 and bf16 and torchao's emulated FP8, in one run.

    python benchmarks/train_cpu.py [--layers 4 --width 512 --tokens 1024 --rounds 15 --json]
    python benchmarks/train_cpu.py --layers 2 --width 1024 --hidden 2816

Steps of all variants take turns, so that a noisy neighbour slows them alike; ratios are of medians. Compile times
are of a cold cache, after one small compile that pays for what is shared (headers, worker start). Where the time of a
step goes, and the most memory that it holds above what was there before, are from a profile of one step.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from typing import Any, Callable

import torch
from torch import nn
from torch._inductor.utils import fresh_cache

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from byte_lm import ByteLM  # noqa: E402

SEQUENCE = 256
GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise", "fp8_compile::scaled_mm")
GEMMS += ("aten::_grouped_mm", "fp8_compile::scaled_grouped_mm")
QUANTIZES = ("fp8_compile::quantize_delayed", "fp8_compile::cast", "fp8_compile::scales")


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


def make_variants(
    make_model: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...], recipes: list[str]
) -> list[Variant]:
    variants = [Variant("inductor fp32", make_model(), batch)]
    variants.append(Variant("inductor bf16", make_model().bfloat16(), batch))
    variants.append(Variant("torchao tensorwise, emulated", torchao_emulated(make_model()), batch))
    variants.append(Variant("fp8 delayed, bf16 model", make_model().bfloat16(), batch, backend="fp8"))
    for recipe in recipes:
        options = {"recipe": recipe}
        variants.append(Variant(f"fp8 {recipe}", make_model(), batch, backend="fp8", options=options))
    return variants


def torchao_emulated(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=None, help="default: 4 x width")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--recipes", nargs="+", default=["delayed", "tensorwise", "rowwise", "blockwise"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return ByteLM(arguments.layers, arguments.width, hidden=arguments.hidden, context=SEQUENCE)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (arguments.tokens // SEQUENCE, SEQUENCE + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    torch.compile(nn.Linear(8, 8))(torch.randn(4, 8)).sum().backward()
    variants = make_variants(make_model, batch, arguments.recipes)
    for _ in range(arguments.rounds):
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
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    size = f"{arguments.layers} layers, d={arguments.width}, {arguments.tokens} tokens"
    print(f"byte LM, {size}, {torch.get_num_threads()} threads")
    print(
        f"{'variant':30} {'step ms':>8} {'ratio':>6} {'compile s':>10} {'ratio':>6} {'loss':>8}"
        f" {'gemm ms':>8} {'quantize':>8} {'rest':>7} {'peak MB':>8}"
    )
    for row in rows:
        print(
            "{variant:30} {step_ms:8.1f} {step_ratio:6.2f} {compile_s:10.1f} {compile_ratio:6.2f} {loss:8.4f}"
            " {gemm:8.1f} {quantize:8.1f} {rest:7.1f} {peak_mb:8.1f}".format(**row)
        )


if __name__ == "__main__":
    main()
