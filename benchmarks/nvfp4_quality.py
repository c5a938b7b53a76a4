"""How good the NVFP4 quantizers are, and how long they take, side by side in one run.

    python benchmarks/nvfp4_quality.py errors        output errors of three MiniLM layers, on text not calibrated on
    python benchmarks/nvfp4_quality.py sweep         time of every method on one matrix, against rtn's
    python benchmarks/nvfp4_quality.py gptq          time of GPTQ on all of MiniLM's layers, Hessians given
    python benchmarks/nvfp4_quality.py gptq-llama    the same on one of the 16 blocks of a Llama of 1.1B parameters

``errors`` prints four tables. In the first, batches are padded to one length and padding counts as tokens, as it does
where shapes are static; in the second, tokens of the texts alone count; in the third, the text that is measured is of
another kind than the text that was calibrated on; the last is measured on the calibration's own text. What the methods
with a Hessian gain depends on that: they live on directions in which inputs hardly vary. Padding is one; the habits of
one kind of text are others.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import torch
from torch import Tensor

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels.nvfp4.quantize import METHODS, NEED_HESSIAN

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import minilm  # noqa: E402

LENGTH = 128
MEASURED = 240  # texts


def moments(model: torch.nn.Module, texts: list[str], padded: bool) -> tuple[dict[str, Tensor], int]:
    """mean(x x^T) of the inputs of the three layers, FP64 [K, K], and over how many tokens."""
    sums: dict[str, Tensor] = {}
    masks: list[Tensor] = []

    def add(name: str, x: Tensor) -> None:
        x = x.flatten(0, 1) if padded else x[masks[-1]]
        sums[name] = sums.get(name, 0.0) + (x.t() @ x).double()

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        for name in minilm.LAYERS
    ]
    with torch.no_grad():
        for batch in minilm.batches(texts, length=LENGTH, padding="max_length" if padded else True):
            masks.append(batch["attention_mask"].bool())
            model(**batch)
    for hook in hooks:
        hook.remove()
    tokens = sum(mask.numel() if padded else int(mask.sum()) for mask in masks)
    return {name: total / tokens for name, total in sums.items()}, tokens


def layer_errors(weight: Tensor, seen: Tensor, *measured: Tensor) -> list[dict[str, float]]:
    """|Wx - W'x| / |Wx| by method: calibrated on tokens with one mean(x x^T), measured on tokens with others."""

    def norm(w: Tensor, moment: Tensor) -> float:
        return float(((w.double() @ moment) * w.double()).sum().sqrt())

    after = {m: quantize_nvfp4(weight, m, seen.float() if m in NEED_HESSIAN else None).dequantize() for m in METHODS}
    return [{m: norm(w - weight, one) / norm(weight, one) for m, w in after.items()} for one in measured]


def print_errors(texts: int) -> None:
    model = minilm.load()
    held_out, other, own = minilm.measured_texts, minilm.other_texts, minilm.calibration_texts
    for padded, tables in (
        (True, {f"padded to {LENGTH} tokens": held_out}),
        (False, {"tokens alone": held_out, "tokens alone, text of another kind": other, "the calibration's own": own}),
    ):
        seen, calibrated_on = moments(model, minilm.calibration_texts(texts), padded)
        measured = [(seen, calibrated_on) if t is own else moments(model, t(MEASURED), padded) for t in tables.values()]
        errors = {}
        for name in minilm.LAYERS:
            weight = model.get_submodule(name).weight.detach()
            errors[name] = layer_errors(weight, seen[name], *(one[name] for one, _ in measured))
        for index, title in enumerate(tables):
            print(f"\n{title}: calibrated on {calibrated_on}, measured on {measured[index][1]}")
            print(f"{'layer':40}" + "".join(f"{method:>18}" for method in METHODS))
            for name in minilm.LAYERS:
                row = errors[name][index]
                cells = [f"{100 * error:.2f} % {error / row['rtn']:.3f}x" for error in row.values()]
                print(f"{name:40}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def print_times(size: int) -> None:
    w = torch.randn(size, size)
    base = None
    for method in ("rtn", "four_over_six", "sweep"):
        quantize_nvfp4(w[:64], method)
        started = time.perf_counter()
        quantize_nvfp4(w, method)
        took = time.perf_counter() - started
        base = base or took
        print(f"{size}x{size} {method:14} {took:6.2f} s  {took / base:5.1f}x", flush=True)


def print_gptq_time() -> None:
    model = minilm.load()
    layers = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    hessians = {k: _hessian(k) for k in {layer.in_features for layer in layers}}
    started = time.perf_counter()
    for layer in layers:
        quantize_nvfp4(layer.weight.detach(), "gptq", hessians[layer.in_features])
    took = time.perf_counter() - started
    weights = sum(layer.weight.numel() for layer in layers)
    print(f"gptq of {len(layers)} layers, {weights / 1e6:.1f} M weights: {took:.1f} s")


def print_gptq_llama_time() -> None:
    """Layers that have the same inputs have one Hessian, as in ``pack``: q, k, v; o; gate, up; down."""
    shared = [[(2048, 2048), (512, 2048), (512, 2048)], [(2048, 2048)], [(8192, 2048)] * 2, [(2048, 8192)]]
    took = in_cpu = 0.0
    for shapes in shared:
        hessian = _hessian(shapes[0][1])
        started, before = time.perf_counter(), time.process_time()
        for rows, k in shapes:
            quantize_nvfp4(torch.randn(rows, k) / k**0.5, "gptq", hessian)
        took, in_cpu = took + time.perf_counter() - started, in_cpu + time.process_time() - before
    times = f"{took:.1f} s, {in_cpu:.1f} s of CPU time; 16 of them: {16 * took / 60:.1f} min"
    print(f"gptq of a block, 60.8 M weights: {times}")


def _hessian(k: int) -> Tensor:
    """Of inputs that are correlated, and some of them rare."""
    x = torch.randn(512, k) * torch.rand(k)
    return x.t() @ x / len(x) + torch.diag(torch.rand(k))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("errors", "sweep", "gptq", "gptq-llama"))
    parser.add_argument("--texts", type=int, default=2000, help="docstrings to calibrate on, if there are as many")
    parser.add_argument("--size", type=int, default=4096, help="of the matrix")
    arguments = parser.parse_args()
    if arguments.what == "errors":
        print_errors(arguments.texts)
    elif arguments.what == "sweep":
        print_times(arguments.size)
    elif arguments.what == "gptq":
        print_gptq_time()
    else:
        print_gptq_llama_time()
