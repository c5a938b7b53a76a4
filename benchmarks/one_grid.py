"""One grid from training to serving: what each way of running a trained model makes of the same weights and inputs.

    python benchmarks/one_grid.py [--models llama gpt2 qwen3_moe] [--recipes delayed mxfp8 ...] [--no-package]

Small models of transformers are trained for a few steps with ``backend="fp8"``; then the forward of training (in
evaluation mode, with frozen scales where the recipe has some) is compared with

    packed       pack(model, scales="training"), uncompiled
    compiled     the same by backend="fp8"
    package      fp8_compile.export and load
    ours         save_checkpoint, read by load_checkpoint
    peers        the same folder, read by transformers and its compressed-tensors

A column has the largest relative difference of logits; "bits" says whether all weights are equal bit for bit.
compressed-tensors decompresses NVFP4 to bf16: "bf16" says that weights are equal once ours are rounded so, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import fp8_compile
from fp8_compile import PackedLinear

RECIPES = ("delayed", "blockwise", "mxfp8", "nvfp4")
# What load_checkpoint is told of inputs: the name of their rounding in the recipe's format.
ACTIVATIONS = {"delayed": "fp8", "blockwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
VOCABULARY, WIDTH, HIDDEN = 64, 128, 128


def llama() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=64))


def gpt2() -> nn.Module:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=64, **no_dropout)
    return GPT2LMHeadModel(config)


def qwen3_moe() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    shape = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN, "mlp_only_layers": []}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads, **experts, max_position_embeddings=64))


WITHOUT_PEERS = ("gpt2",)  # compressed-tensors knows nn.Linear, and GPT-2 of transformers is made of Conv1D
COLUMNS = ("packed", "compiled", "package", "ours", "peers")
MODELS = {"llama": llama, "gpt2": gpt2, "qwen3_moe": qwen3_moe}


def trained(name: str, recipe: str, backend: Any = None) -> tuple[nn.Module, Any, Tensor]:
    """A model after a few steps, its compiled form, and token ids."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]()
    run = torch.compile(model, backend=backend or fp8_compile.Backend(fp8_compile.Config(recipe=recipe)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        ids = torch.randint(VOCABULARY, (2, 24))
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), run, torch.randint(VOCABULARY, (2, 24))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.detach() - expected).abs().amax() / expected.abs().amax())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Packed weights, dequantized."""
    return {name: one.dequantize() for name, one in model.named_modules() if isinstance(one, PackedLinear)}


def same_bits(model: nn.Module, other: nn.Module) -> str:
    """Whether the weights of the packed layers are equal in another model, packed or not."""
    wanted, layers = weights_of(model), dict(other.named_modules())
    found = {name: layers[name] for name in wanted}
    values = {name: one.dequantize() if isinstance(one, PackedLinear) else _plain(one) for name, one in found.items()}
    if all(torch.equal(values[name].float(), weight) for name, weight in wanted.items()):
        return "yes"
    pairs = [(values[name].bfloat16(), weight.bfloat16()) for name, weight in wanted.items()]
    unequal = sum(int((one != other).sum()) for one, other in pairs)
    count = sum(one.numel() for one, _ in pairs)
    return "bf16" if not unequal else f"NO ({unequal / count:.1e} of them differ in bf16)"


def _plain(layer: nn.Module) -> Tensor:
    weight = layer.weight.detach()
    return weight.t() if type(layer).__name__ == "Conv1D" else weight


def read_by_transformers(folder: Path, ids: Tensor) -> nn.Module:
    """A folder by transformers and compressed-tensors, which decompresses at the first call: MXFP8 to bf16, which is
    exact, but can't be multiplied with FP32 then."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with contextlib.suppress(RuntimeError):
            theirs(input_ids=ids)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.float()
    return theirs


def compared(
    name: str, recipe: str, *, package: bool = True, compiled: bool = True, backend: Any = None
) -> dict[str, Any]:
    """One row of the table."""
    model, run, ids = trained(name, recipe, backend)
    if recipe in ("delayed", "nvfp4"):
        fp8_compile.freeze_scales(model)
    with torch.no_grad():
        expected = run(input_ids=ids, use_cache=False).logits
        report = fp8_compile.pack(model, scales="training", progress=False)
        row: dict[str, Any] = {"layers": len(report.packed), "packed": distance(Logits(model)(ids), expected)}
        if compiled:
            row["compiled"] = distance(torch.compile(Logits(model), backend="fp8")(ids), expected)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        if package:
            path = Path(scratch) / "model.pt2"
            fp8_compile.export(Logits(model).eval(), (ids,), path)
            row["package"] = distance(fp8_compile.load(path)(ids), expected)
        folder = Path(scratch) / "folder"
        fp8_compile.save_checkpoint(model, folder)
        ours = fp8_compile.load_checkpoint(MODELS[name]().eval(), folder, activations=ACTIVATIONS[recipe])
        row["ours"] = distance(Logits(ours)(ids), expected)
        row["bits"] = [same_bits(model, ours)]
        if name not in WITHOUT_PEERS:
            try:
                theirs = read_by_transformers(folder, ids)
            except RuntimeError as error:
                row["bits"].append(f"not read: {str(error).partition('.')[0]}")
            else:
                row["peers"] = distance(Logits(theirs)(ids), expected)
                row["bits"].append(same_bits(model, theirs))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--no-package", action="store_true", help="leave the package out, which takes longest")
    options = parser.parse_args()
    logging.getLogger("fp8_compile").setLevel(logging.ERROR)
    print("| model | recipe | layers | packed | compiled | package | ours | peers | bits: ours, peers |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.models:
        for recipe in options.recipes:
            row = compared(name, recipe, package=not options.no_package)
            cells = [f"{row[key]:.1e}" if key in row else "-" for key in COLUMNS]
            bits = ", ".join(row["bits"])
            print(f"| {name} | {recipe} | {row['layers']} | {' | '.join(cells)} | {bits} |", flush=True)


if __name__ == "__main__":
    main()
