"""What the host adds to the work: microseconds of calls, as ratios to Inductor and to an ahead-of-time package.

    python benchmarks/host_time.py [layers operations runner decode] [--rounds 200] [--threads 1] [--folder packages]

    layers       seven Linear layers of 16x16: forward under inference, forward and step in training
    operations   one call of each operation that a graph calls on a CPU, on 16x16 operands
    runner       what a call of compiled code costs before the code begins, without and with an attached optimizer
    decode       a 12-layer GPT that decodes one sequence, compiled in the process and as a package

Contenders take turns, a call each, so that a noisy neighbour slows them alike; times are medians, and a ratio is the
median of the ratios of the rounds. With one thread, as is the default, it is the CPU time of that thread, in which what
other processes do does not count. Without names all sections run. A section is a function that prints its lines.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
import time
from typing import Any, Callable, Mapping

import nvfp4_decode
import torch
from torch import Tensor, fx, nn

import fp8_compile
from fp8_compile.backend.graph import compile_graph
from fp8_compile.backend.interpret import NO_CACHE, run_uncompiled
from fp8_compile.kernels import delayed_scaling, fp8_weight
from fp8_compile.kernels.cpu import nvfp4, quantize, quantize_mm, scaled_mm
from fp8_compile.kernels.formats import E4M3
from fp8_compile.kernels.fp8_inputs import quantize_inputs_op
from fp8_compile.kernels.nvfp4.ops import mm_op as nvfp4_mm_op
from fp8_compile.kernels.quantize import quantize_op

LAYERS, WIDTH = 7, 16
BASE = "inductor"
CALLS = 50  # of an operation in a round
TOKENS = 4  # in a round
WARM = 20  # calls before the first round: compilation, and scales of delayed scaling
Timed = Callable[[], float]  # does something and returns how many seconds of it count


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(run: Callable[[], Any]) -> Timed:
    """The whole of it counts."""

    def once() -> float:
        start = clock()
        run()
        return clock() - start

    return once


def take_turns(contenders: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by contender."""
    for contender in contenders.values():
        for _ in range(WARM):
            contender()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            found[name].append(contender())
    return found


def ratio(times: list[float], base: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, base, strict=True))


def show(title: str, found: Mapping[str, list[float]], base: str = BASE) -> None:
    """One line per contender: microseconds, and the ratio to the base."""
    print(f"\n{title}")
    for name, times in found.items():
        print(f"  {name:32}{statistics.median(times) * 1e6:10.1f} us{ratio(times, found[base]):8.2f} x {base}")


# Seven small layers.


def layers(rounds: int, folder: pathlib.Path) -> None:
    x = torch.randn(WIDTH, WIDTH)
    with torch.no_grad():
        models = {name: timed(lambda run=run: run(x)) for name, run in for_inference(x).items()}
        show(f"forward of {LAYERS} layers of {WIDTH}x{WIDTH}, inference", take_turns(models, rounds))
    models = {name: forward_of_a_step(run, x) for name, run in for_training().items()}
    show("the same in training, the forward of a step", take_turns(models, rounds))
    models = {name: timed(lambda run=run: run(x).sum().backward()) for name, run in for_training().items()}
    show("the same in training, forward and backward", take_turns(models, rounds))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def for_inference(x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Compiled models without gradients. Of delayed scaling, with scales of three training steps that are frozen."""
    made: dict[str, Any] = {BASE: torch.compile(small_model().requires_grad_(False))}
    for recipe in ("tensorwise", "rowwise"):
        model = small_model().requires_grad_(False)
        made[f"fp8, {recipe}"] = torch.compile(model, backend="fp8", options={"recipe": recipe})
    model = small_model()
    frozen = torch.compile(model, backend="fp8", options={"recipe": "delayed"})
    with torch.enable_grad():
        for _ in range(3):
            frozen(x).sum().backward()
    fp8_compile.freeze_scales(model.requires_grad_(False))
    made["fp8, delayed, frozen"] = frozen
    packed = small_model().requires_grad_(False)
    fp8_compile.pack(packed, format="fp8", activations="fp8", progress=False)
    made["fp8, packed"] = torch.compile(packed, backend="fp8")
    return made


def for_training() -> dict[str, Callable[[Tensor], Tensor]]:
    made: dict[str, Any] = {BASE: torch.compile(small_model())}
    for recipe in ("tensorwise", "delayed"):
        made[f"fp8, {recipe}"] = torch.compile(small_model(), backend="fp8", options={"recipe": recipe})
    return made


def forward_of_a_step(run: Callable[[Tensor], Tensor], x: Tensor) -> Timed:
    """Backward runs too, or there would be no history of gradients, and does not count."""

    def step() -> float:
        start = clock()
        y = run(x)
        seconds = clock() - start
        y.sum().backward()
        return seconds

    return step


# Single operations.


def operations(rounds: int, folder: pathlib.Path) -> None:
    """A call with its work, and the call itself: the same on operands without rows, which leave nothing to compute."""
    found = {}
    for rows in (WIDTH, 0):
        times = take_turns({name: timed(repeated(call)) for name, call in small_calls(rows).items()}, rounds)
        found[rows] = {name: statistics.median(some) / CALLS * 1e6 for name, some in times.items()}
    print(f"\none operation on {WIDTH}x{WIDTH} operands")
    for name, whole in found[WIDTH].items():
        print(f"  {name:32}{whole:10.1f} us, the call alone{found[0][name]:6.1f} us")


def repeated(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def small_calls(rows: int) -> dict[str, Callable[[], Any]]:
    """Each as a compiled graph makes it, on so many rows."""
    one, weight, bias, dtype = torch.ones(1, 1), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH), E4M3.dtype
    x, codes, w = weight[:rows], weight.to(dtype), weight[:rows]
    q, right, added, whole = codes[:rows], codes.t(), bias[:rows], (-1, -1)
    packed = nvfp4.interleave(torch.zeros(WIDTH, WIDTH // 2, dtype=torch.uint8), torch.ones(WIDTH, 1).to(dtype))
    global_scale, amaxes = torch.ones(()), torch.ones(rows)
    counts, room = torch.zeros(10, rows, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    state = (torch.ones(rows, 16), torch.ones(2, rows), counts, room, torch.ones(2, rows))
    recorded, slots = [one] * rows, list(range(rows))
    return {
        "aten.addmm": lambda: torch.ops.aten.addmm.default(bias, x, weight),
        "scaled_mm": lambda: scaled_mm.scaled_mm_op(q, right, one, one, bias, torch.float32),
        "quantize": lambda: quantize_op(x, dtype, whole),
        "scales": lambda: quantize.scales_op(x, dtype, whole),
        "cast": lambda: quantize.cast_op(x, one, dtype, whole),
        "quantize_delayed": lambda: quantize.quantize_delayed_op(x, one, dtype, True),
        "quantize_mm": lambda: quantize_mm.quantize_mm_op(x, None, w, None, added, False, False),
        "quantize_delayed_mm": lambda: quantize_mm.quantize_delayed_mm_op(x, one, w, None, added, False),
        "quantize_inputs": lambda: quantize_inputs_op(x, None),
        "fp8_mm": lambda: fp8_weight.mm_op(x, codes, bias, bias),
        "nvfp4_mm": lambda: nvfp4_mm_op(x, *packed, global_scale, bias, "int8", "interleaved"),
        "update_scales_": lambda: delayed_scaling.update_in_place_op(amaxes, *state, 448.0, "max", 1),
        f"record_amaxes_, {WIDTH} of them": lambda: delayed_scaling.record_in_place_op(amaxes, recorded, slots),
    }


# Decoding.


def decode(rounds: int, folder: pathlib.Path) -> None:
    found = take_turns(decoders(folder), max(1, rounds // 8))
    show(f"a token of a {nvfp4_decode.LAYERS}-layer GPT, NVFP4 weights, int8 inputs", found, base="package")


def decoders(folder: pathlib.Path) -> dict[str, Timed]:
    """The package, which is made where the folder does not have it, and the model compiled in this process."""
    torch.manual_seed(0)
    model = nvfp4_decode.GPT().bfloat16().eval().requires_grad_(False)
    options: dict[str, Any] = {"method": "rtn", "activations": "int8"}
    token, position = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpt_{nvfp4_decode.LAYERS}x{nvfp4_decode.WIDTH}_{torch.__version__}.pt2"
    if not path.exists():
        fp8_compile.export(copy.deepcopy(model), (token, position), path, weights="nvfp4", **options)
    package = fp8_compile.load(path)
    fp8_compile.pack(model, progress=False, **options)
    compiled = torch.compile(model, backend="fp8")

    def tokens(run: Callable[..., Tensor]) -> Timed:
        """One of several in a row: the first ones find the other contender's weights in the caches."""

        @torch.no_grad()
        def some() -> float:
            for _ in range(TOKENS // 2):
                run(token, position)
            start = clock()
            for _ in range(TOKENS):
                run(token, position)
            return (clock() - start) / TOKENS

        return some

    return {"package": tokens(package), "in process": tokens(compiled)}


def runner(rounds: int, folder: pathlib.Path) -> None:
    """Seven layers whose code does nothing: finding their state, whether copies of weights are fresh, the phase."""
    print("\ncalls of code that does nothing, seven layers: microseconds")
    for name, attached in (("without attach", False), ("with attach", True)):
        seconds = take_turns({name: idle_call(attached)}, rounds)[name]
        print(f"  {name:<38} {1e6 * statistics.median(seconds) / CALLS:7.1f} us")


def idle_call(attached: bool) -> Timed:
    torch._dynamo.reset()
    model, codes = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        config = fp8_compile.Config(inductor=dict(NO_CACHE))
        codes.append(compile_graph(gm, example_inputs, config, inner_compile=run_uncompiled)[0])
        return codes[0]

    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.01)
    if attached:
        fp8_compile.attach(compiled, optimizer)
    for _ in range(3):
        compiled(torch.randn(WIDTH, WIDTH)).sum().backward()
    (running,) = codes[0]._runners.values()
    calls: list[Any] = []
    running.compiled = lambda *args: calls.append(args) or args[:1]
    compiled(torch.randn(WIDTH, WIDTH))
    arguments = calls[0][: len(calls[0]) - len(running.inputs)]
    running.compiled = lambda *args: None
    return timed(lambda: [codes[0](*arguments) for _ in range(CALLS)])


SECTIONS = {"layers": layers, "operations": operations, "runner": runner, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("packages"), help="where packages are kept")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {', '.join(unknown)}; expected some of {', '.join(SECTIONS)}")
    torch.set_num_threads(arguments.threads)
    for name in arguments.sections or SECTIONS:
        SECTIONS[name](arguments.rounds, arguments.folder)


if __name__ == "__main__":
    main()
