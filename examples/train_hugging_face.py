"""Train a small Llama in FP8 with Hugging Face's Trainer.

    python examples/train_hugging_face.py [--steps 60]          # needs transformers and accelerate

Two lines are of interest: the backend in TrainingArguments, and the callback that attaches master weights.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8_compile
from byte_lm import BYTES, batches, stdlib_text
from fp8_compile.hugging_face import Fp8Callback

BATCH, TIME = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, max_position_embeddings=TIME, **shape)).to(torch.bfloat16)
    source = batches(stdlib_text(), batch=1, time=TIME, generator=torch.Generator().manual_seed(0))
    windows = [tokens[0] for tokens, _ in itertools.islice(source, options.steps * BATCH)]
    data = [{"input_ids": window, "labels": window} for window in windows]  # the model shifts the labels itself
    callback = Fp8Callback(loss_scale="dynamic", master_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            torch_compile=True,
            torch_compile_backend="fp8",
            max_steps=options.steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    slots = len(fp8_compile.scaling_state(model).stats())
    print(f"{callback.training.steps} steps in FP8, {callback.training.skipped_steps} skipped, {slots} scaled tensors")


if __name__ == "__main__":
    main()
