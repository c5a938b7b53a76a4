"""How long it takes until a model has been compiled, against Inductor: wall time and CPU time of the first step.

    python benchmarks/compile_time.py [--only whole blocks explain] [--rounds 3] [--layers 12] [--blocks 24] [--json]

    whole      a byte language model of 12 layers, compiled at once; caches are empty
    warm       the same in a second process, which finds in the caches what the first one left there
    blocks     24 equal blocks, each compiled by itself with ``block.compile(...)``; caches are empty
    explain    ``fp8_compile.explain`` of a Llama with 32 layers on the meta device; nothing to compare it with

Each measurement is a process with a cache folder of its own. What is timed is ``torch.compile``, the first forward and
backward, and our own imports, but not those of torch. The C++ library of the CPU kernels, which is built once per
machine, is in the cache folder already; building it is not counted. The sides take turns, and a figure is the median
over the rounds of its ratio to the run of Inductor in the same round. CPU time is that of the process and of the
compilers that it starts: on a machine that is shared, it is the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, NamedTuple

INDUCTOR, RECIPES = "inductor", ("delayed", "tensorwise")
WIDTH, HEADS, TIME, BATCH = 256, 4, 64, 8
LIBRARY = pathlib.Path("fp8_compile") / "kernels"  # in a cache folder


class Seconds(NamedTuple):
    wall: float
    cpu: float


# ---- what is measured, in a process of its own ----------------------------------------------------------------------


def whole(side: str, layers: int) -> Seconds:
    """Compile a language model at once."""
    model, batch = _language_model(layers)
    return timed(lambda: _compiled(model, side)(*batch).backward())


def blocks(side: str, layers: int) -> Seconds:
    """Compile the blocks of a language model one by one."""
    model, batch = _language_model(layers)

    def step() -> None:
        for block in model.blocks:
            block.compile(**_how(side))
        model(*batch).backward()

    return timed(step)


def explain(side: str, layers: int) -> Seconds:
    """The report for a Llama without memory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))
        tokens = torch.zeros(1, 512, dtype=torch.int64)

    def report() -> None:
        import fp8_compile

        found = fp8_compile.explain(model, kwargs={"input_ids": tokens, "labels": tokens, "use_cache": False})
        assert len(found.rewritten) >= 7 * 3 * layers, found

    return timed(report)


MEASURED: dict[str, Callable[[str, int], Seconds]] = {"whole": whole, "blocks": blocks, "explain": explain}


def timed(step: Callable[[], None]) -> Seconds:
    """How long it takes, with the processes that it waits for."""
    import torch._inductor.compile_fx  # noqa: F401  both sides need it

    wall, cpu = time.perf_counter(), _cpu_seconds()
    step()
    return Seconds(time.perf_counter() - wall, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _language_model(layers: int) -> tuple[Any, tuple[Any, Any]]:
    import torch

    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
    from byte_lm import ByteLM

    torch.manual_seed(0)
    model = ByteLM(layers=layers, d=WIDTH, heads=HEADS, context=TIME)
    tokens, targets = torch.randint(0, 256, (2, BATCH, TIME))
    return model, (tokens, targets)


def _how(side: str) -> dict[str, Any]:
    return {"backend": INDUCTOR} if side == INDUCTOR else {"backend": "fp8", "options": {"recipe": side}}


def _compiled(model: Any, side: str) -> Any:
    import torch

    return torch.compile(model, **_how(side))


# ---- processes ------------------------------------------------------------------------------------------------------


def measure(what: str, side: str, layers: int, cache: pathlib.Path) -> Seconds:
    """Run one measurement in a process that has this cache folder."""
    command = [sys.executable, __file__, "--measure", what, side, str(layers)]
    done = subprocess.run(command, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}, stdout=subprocess.PIPE)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}")
    return Seconds(*json.loads(done.stdout.splitlines()[-1]))


def rounds_of(what: str, layers: int, rounds: int, library: pathlib.Path) -> dict[str, dict[str, list[Seconds]]]:
    """Measurement -> side -> one time per round. That of ``whole`` is followed by one with warm caches."""
    found: dict[str, dict[str, list[Seconds]]] = {}
    for _ in range(rounds):
        for side in (INDUCTOR, *RECIPES) if what != "explain" else ("",):
            with tempfile.TemporaryDirectory() as folder:
                cache = pathlib.Path(folder)
                shutil.copytree(library, cache / LIBRARY)
                for name in (what, "warm") if what == "whole" else (what,):
                    took = measure(what, side, layers, cache)
                    found.setdefault(name, {}).setdefault(side, []).append(took)
                    print(f"{name} {side}: {took.wall:.1f} s, {took.cpu:.1f} s of CPU", file=sys.stderr)
    return found


def built_library(folder: pathlib.Path) -> pathlib.Path:
    """Build the CPU kernels; the folder that they are in."""
    code = "from fp8_compile.kernels.cpu.library import library; library()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}, check=True)
    return folder / LIBRARY


# ---- the table ------------------------------------------------------------------------------------------------------


def summary(found: dict[str, dict[str, list[Seconds]]]) -> list[dict[str, Any]]:
    """One row per measurement and side: medians of seconds, and of the ratios to Inductor's in the same round."""
    rows = []
    for name, sides in found.items():
        for side, times in sides.items():
            row: dict[str, Any] = {"what": name, "side": side}
            for kind in Seconds._fields:
                own = [getattr(one, kind) for one in times]
                row[kind] = statistics.median(own)
                if side and side != INDUCTOR:
                    against = [getattr(one, kind) for one in sides[INDUCTOR]]
                    row[f"{kind} ratio"] = statistics.median(one / other for one, other in zip(own, against))
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], rounds: int) -> str:
    lines = [f"{'what':<10}{'side':<13}{'wall':>9}{'':>8}{'CPU':>9}{'':>8}"]
    for row in rows:
        line = f"{row['what']:<10}{row['side']:<13}"
        for kind in Seconds._fields:
            ratio = f"{row[f'{kind} ratio']:.2f}x" if f"{kind} ratio" in row else ""
            line += f"{row[kind]:>7.1f} s{ratio:>8}"
        lines.append(line.rstrip())
    lines.append(f"medians of {rounds} rounds; without the build of the CPU kernels' library, once per machine")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=list(MEASURED))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12, help="of the whole model")
    parser.add_argument("--blocks", type=int, default=24, help="that are compiled one by one")
    parser.add_argument("--explained", type=int, default=32, help="layers of the Llama")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, side, layers = options.measure
        print(json.dumps(MEASURED[what](side, int(layers))))
        return
    layers_of = {"whole": options.layers, "blocks": options.blocks, "explain": options.explained}
    found: dict[str, dict[str, list[Seconds]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = built_library(pathlib.Path(folder))
        for what in options.only:
            found |= rounds_of(what, layers_of[what], options.rounds, library)
    rows = summary(found)
    print(json.dumps(rows, indent=2) if options.json else table(rows, options.rounds))


if __name__ == "__main__":
    main()
