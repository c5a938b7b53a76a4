"""Fine-tune a model that exists in four bits only: LoRA over an NVFP4 base, on the CPU.

    python examples/lora_packed.py [--steps 100]          # needs transformers and peft

A small Llama learns bytes of the standard library's source in high precision and is packed. Then adapters are trained
over the packed base on text of another kind, the library's docstrings. The base is multiplied from its packed form in
forward and backward; no layer is ever stored dequantized.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator

import torch
from minilm import calibration_texts, measured_texts
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fp8_compile
from byte_lm import BYTES, batches, stdlib_text

BATCH, TIME = 8, 128


def windows(text: Tensor) -> Iterator[Tensor]:
    for tokens, _ in batches(text, batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(0)):
        yield tokens


def train(run: torch.nn.Module, text: Tensor, steps: int, learning_rate: float) -> float:
    """Mean loss of the last ten steps; ``run`` is the compiled model."""
    parameters = [p for p in run.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    losses = []
    for tokens in itertools.islice(windows(text), steps):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def as_bytes(texts: list[str]) -> Tensor:
    return torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8).long()


def evaluate(model: torch.nn.Module, text: Tensor) -> float:
    with torch.no_grad():
        losses = [model(input_ids=tokens, labels=tokens).loss.item() for tokens in itertools.islice(windows(text), 4)]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of each training (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, max_position_embeddings=TIME, **shape))
    print(f"base in FP32: loss {train(torch.compile(model), stdlib_text(), options.steps, 1e-3):.3f} on source code")

    model.requires_grad_(False)
    before = sum(p.nbytes for p in model.parameters())
    fp8_compile.pack(model, method="sweep", progress=False)
    after = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    print(f"packed to NVFP4: {before / 1e6:.1f} MB -> {after / 1e6:.1f} MB")

    text, held_out = as_bytes(calibration_texts(2000)), as_bytes(measured_texts(500))
    start = evaluate(model, held_out)
    lora = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    run = torch.compile(lora, backend="fp8", options={"exclude": ["*lora_*", "*lm_head"]})
    train(run, text, options.steps, 1e-3)
    print(f"adapters over the packed base: loss {start:.3f} -> {evaluate(lora, held_out):.3f} on held-out docstrings")

    with tempfile.TemporaryDirectory() as folder:
        lora.save_pretrained(folder)  # adapters alone
        again = PeftModel.from_pretrained(lora.unload(), folder)
        print(f"adapters saved and loaded: loss {evaluate(again, held_out):.3f}")
    fp8_compile.merge_adapters(again)
    print(f"merged into the packed base, rounded to four bits again: loss {evaluate(again, held_out):.3f}")


if __name__ == "__main__":
    main()
