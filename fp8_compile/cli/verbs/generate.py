"""Let a language model speak: go on with a prompt, from packed weights or plain ones.

    fp8-compile generate ./Llama-3.2-1B-nvfp4 "Once upon a time"
    fp8-compile generate ./packed "Once upon a time" --tokens 200 --temperature 0.8 --seed 1

Without a temperature the likeliest token is taken each time, so two folders can be compared. The model runs in eager
mode, which dequantizes each layer as it is used: this is to look at, not to serve.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fp8_compile.cli.terminal import say

HELP = "go on with a prompt, from packed weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder, packed or not")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on with")
    parser.add_argument("--tokens", type=int, default=64, help="how many tokens at most (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="draw tokens at random (default 0: do not)")
    parser.add_argument("--seed", type=int, default=0, help="of the random draws (default 0)")


def run(options: argparse.Namespace) -> int:
    import torch

    from fp8_compile.cli.language_models import load_language_model, load_tokenizer

    if options.tokens < 1 or options.temperature < 0:
        raise ValueError(
            f"--tokens {options.tokens} --temperature {options.temperature}: expected at least 1, and at least 0"
        )
    tokenizer = load_tokenizer(options.folder)
    inputs = tokenizer(options.prompt, return_tensors="pt")
    if not inputs["input_ids"].numel():
        raise ValueError("the prompt has no tokens; expected some text")
    model = load_language_model(options.folder)
    torch.manual_seed(options.seed)
    drawn = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    began = time.perf_counter()
    ids = inputs["input_ids"]
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.tokens, **drawn
        )[0, ids.shape[1] :]
    took = time.perf_counter() - began
    say(options.prompt + tokenizer.decode(out, skip_special_tokens=True))
    say(f"({len(out)} tokens in {took:.1f} s)")
    return 0
