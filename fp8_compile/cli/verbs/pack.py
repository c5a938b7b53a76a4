"""Pack the weights of a Hugging Face folder to NVFP4 or FP8.

    fp8-compile pack ./Llama-3.2-1B ./Llama-3.2-1B-nvfp4
    fp8-compile pack ./model ./packed --method rtn --exclude 'model.layers.0.*' --layout modelopt
    fp8-compile pack ./model ./packed --method gptq --calibration texts.txt
    fp8-compile pack ./model ./packed --format fp8 --activations fp8 --calibration texts.txt

Without --calibration it works shard by shard, with one layer in memory at a time. With it, the model is loaded and runs
on the texts, and its blocks are packed one after the other, by the inputs that the packed blocks before them give. A
run cut short leaves a folder without config.json, which nothing takes for complete; the same command again goes on from
there.

The result loads with fp8_compile.load_checkpoint, with transformers, and with servers that read its layout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fp8_compile.cli.terminal import say

HELP = "pack a Hugging Face folder to NVFP4 or FP8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="a folder with config.json and *.safetensors")
    parser.add_argument("target", type=Path, metavar="DST", help="the folder to write; made where it does not exist")
    parser.add_argument("--format", default="nvfp4", help="nvfp4 (default), fp8, fp8_blocks or mxfp8")
    parser.add_argument("--method", help="how NVFP4 is chosen (default sweep, with --calibration gptq; rtn is fastest)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="text to run the model on, UTF-8")
    parser.add_argument("--activations", help="fp8: store static scales of FP8 inputs; needs --calibration")
    parser.add_argument("--tokens", type=int, default=512, help="per row of the calibration (default 512)")
    parser.add_argument("--rows", type=int, default=32, help="of the calibration, at most (default 32)")
    parser.add_argument("--layout", default="compressed-tensors", help="compressed-tensors (default) or modelopt")
    parser.add_argument("--include", action="append", metavar="GLOB", help="layers to pack; repeat it")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="layers to leave alone; repeat it")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    import fp8_compile

    chosen = {
        "format": options.format,
        "method": options.method,
        "layout": options.layout,
        "include": tuple(options.include or ("*",)),
        "exclude": tuple(options.exclude or ()),
        "progress": not options.quiet,
    }
    if options.calibration is None:
        if options.activations is not None:
            raise ValueError("--activations stores scales that a calibration gives; add --calibration FILE")
        packed = fp8_compile.pack_folder(options.source, options.target, **chosen)
    else:
        from fp8_compile.packing.checkpoints.calibrated_folder import pack_calibrated_folder

        from .eval import read_text

        sizes = {"length": options.tokens, "count": options.rows, "activations": options.activations}
        text = read_text(options.calibration)
        packed = pack_calibrated_folder(options.source, options.target, text, **sizes, **chosen)
    before, after = (sum(file.stat().st_size for file in _weights(path)) for path in (options.source, options.target))
    layers = f"{len(packed)} layer{'s'[: len(packed) != 1]}"
    say(f"packed {layers}: {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB in {options.target}")
    return 0


def _weights(folder: Path) -> list[Path]:
    return list(folder.glob("*.safetensors"))
