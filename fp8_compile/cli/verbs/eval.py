"""Measure a language model on texts: perplexity, and what packing did to it.

    fp8-compile eval ./packed --texts wiki.txt
    fp8-compile eval ./packed --against ./original --texts wiki.txt

With --against: both perplexities, the KL divergence of the packed model's predictions from the original's (mean over
tokens, in nats), how often both find the same token likeliest, and the relative error of each packed layer's output on
the inputs that it gets in the packed model. Experts are compared by their weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fp8_compile.cli.terminal import say

HELP = "perplexity of a language model, and the error of packing it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a Hugging Face folder, packed or not")
    parser.add_argument("--texts", type=Path, required=True, metavar="FILE", help="text to predict, UTF-8")
    parser.add_argument("--against", type=Path, metavar="SOURCE", help="the folder of the original model")
    parser.add_argument("--tokens", type=int, default=512, help="per row (default 512)")
    parser.add_argument("--rows", type=int, default=16, help="at most (default 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def run(options: argparse.Namespace) -> int:
    from fp8_compile.cli.language_models import load_language_model, load_tokenizer
    from fp8_compile.packing.checkpoints.calibrated_folder import text_batches
    from fp8_compile.packing.compare import compare, perplexity

    text = read_text(options.texts)
    batches = text_batches(load_tokenizer(options.folder), text, options.tokens, options.rows)
    model = load_language_model(options.folder)
    if options.against is None:
        figures = {"tokens": sum(row.numel() - 1 for row in batches), "perplexity": perplexity(model, batches)}
        say(f"perplexity {figures['perplexity']:.4f} over {figures['tokens']} tokens")
    else:
        compared = compare(load_language_model(options.against), model, batches)
        figures = compared._asdict()
        say(f"perplexity {compared.before:.4f} -> {compared.perplexity:.4f} over {compared.tokens} tokens")
        say(f"KL divergence {compared.divergence:.5f} nats per token; same likeliest token {compared.agreement:.1%}")
        width = max(map(len, compared.layers), default=0)
        for name, error in sorted(compared.layers.items(), key=lambda one: -one[1]):
            say(f"  {name:{width}}  {error:.4f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
