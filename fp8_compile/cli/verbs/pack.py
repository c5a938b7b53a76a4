"""Pack the weights of a Hugging Face folder to NVFP4, shard by shard: one layer in memory at a time.

    fp8-compile pack ./Llama-3.2-1B ./Llama-3.2-1B-nvfp4
    fp8-compile pack ./model ./packed --method rtn --exclude 'model.layers.0.*' --layout modelopt

The result loads with fp8_compile.load_checkpoint and with servers that read its layout. A run cut short leaves a folder
without config.json, which nothing takes for complete.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fp8_compile.cli.terminal import say

HELP = "pack a Hugging Face folder to NVFP4"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="a folder with config.json and *.safetensors")
    parser.add_argument("target", type=Path, metavar="DST", help="the folder to write; made where it does not exist")
    parser.add_argument("--method", default="sweep", help="how scales are chosen (default sweep; rtn is fastest)")
    parser.add_argument("--layout", default="compressed-tensors", help="compressed-tensors (default) or modelopt")
    parser.add_argument("--include", action="append", metavar="GLOB", help="layers to pack; repeat it")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="layers to leave alone; repeat it")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    import fp8_compile

    packed = fp8_compile.pack_folder(
        options.source,
        options.target,
        method=options.method,
        layout=options.layout,
        include=tuple(options.include or ("*",)),
        exclude=tuple(options.exclude or ()),
        progress=not options.quiet,
    )
    before, after = (sum(file.stat().st_size for file in _weights(path)) for path in (options.source, options.target))
    layers = f"{len(packed)} layer{'s'[: len(packed) != 1]}"
    say(f"packed {layers}: {before / 1e6:,.1f} MB -> {after / 1e6:,.1f} MB in {options.target}")
    return 0


def _weights(folder: Path) -> list[Path]:
    return list(folder.glob("*.safetensors"))
