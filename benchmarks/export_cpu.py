"""A Llama's packages against the compiled model and against the bf16 package, side by side in one run.

    python benchmarks/export_cpu.py [--folder packages] [--threads 2] [--tokens 1 64]

One token at a time through four layers of width 1024 (batch 1, no cache), then 64 tokens. Packages are made once and
kept in the folder. Times are medians of rounds that take turns.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import statistics
import time
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.export import Dim

import fp8_compile

ROUNDS, CALLS = 7, 5
NVFP4, FP8 = {"weights": "nvfp4", "method": "rtn"}, {"weights": "fp8"}
INT8_INPUTS, FP8_INPUTS = {"activations": "int8"}, {"activations": "fp8"}
# The head is not packed: packages and compiled models have it in bf16.
COMPILED = {"NVFP4": NVFP4, "NVFP4, int8 inputs": NVFP4 | INT8_INPUTS, "FP8, FP8 inputs": FP8 | FP8_INPUTS}


class Logits(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=512,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def packages(model: nn.Module, folder: pathlib.Path) -> dict[str, Callable[..., Any]]:
    """Loaded packages by name; made where the folder does not have them."""
    example = (torch.randint(4096, (2, 16)),)
    sizes = ({0: Dim("batch", max=64), 1: Dim("tokens", max=512)},)
    wanted = {
        "bf16": {},
        **{name: COMPILED[name] for name in ("NVFP4", "NVFP4, int8 inputs")},
        "FP8": FP8,
        "FP8, FP8 inputs": COMPILED["FP8, FP8 inputs"],
        "FP8, FP8 inputs, static": FP8 | FP8_INPUTS,
    }
    loaded = {}
    for number, (name, options) in enumerate(wanted.items()):
        path = folder / f"package_{number}.pt2"
        if not path.exists():
            if "static" in name:
                batches = [torch.randint(4096, (4, 64)) for _ in range(4)]
                options = options | {"calibration": fp8_compile.calibrate(model, batches, hessians=False)}
            fp8_compile.export(model, example, path, dynamic_shapes=sizes, **options)
        start = time.perf_counter()
        loaded[f"{name} package"] = fp8_compile.load(path)
        seconds, size = time.perf_counter() - start, path.stat().st_size / 1e6
        print(f"{name} package: {size:.1f} MB, loaded in {seconds:.3f} s", flush=True)
    return loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("packages"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="*", default=(1, 64), help="lengths to measure (default 1 64)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = Logits().eval().to(torch.bfloat16)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs = packages(model, arguments.folder)
    for name, options in COMPILED.items():
        packed = copy.deepcopy(model)
        pack = {"format": options["weights"], **{k: v for k, v in options.items() if k != "weights"}}
        fp8_compile.pack(packed, progress=False, **pack)
        runs[f"{name} compiled"] = torch.compile(packed, backend="fp8", dynamic=True)
    with torch.no_grad():
        for tokens in arguments.tokens:
            x = torch.randint(4096, (1, tokens))
            results = {name: run(x) for name, run in runs.items()}
            for name in COMPILED:
                same = torch.equal(results[f"{name} package"], results[f"{name} compiled"])
                # torch.compile makes code of its own for one token, with other roundings to bf16 in between.
                print(f"{tokens} tokens, {name}: package equal to the compiled model: {same}")
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(ROUNDS):
                for name, run in runs.items():
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        run(x)
                    times[name].append((time.perf_counter() - start) / CALLS)
            base = statistics.median(times["bf16 package"])
            for name, taken in times.items():
                median = statistics.median(taken)
                print(f"{tokens:3} tokens  {name:32} {median * 1e3:8.2f} ms  {base / median:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
