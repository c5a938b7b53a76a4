"""What this machine can do for FP8, with a remedy for what it can't.

Every line is tried out: kernels are built and compared, a bf16 matmul runs, caches are written to. Exit code 0:
nothing is red. With --compile a small layer is compiled and trained as well, which takes some twenty seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from fp8_compile.cli.terminal import coloured, safe

HELP = "check this machine, with remedies"
SIGNS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--compile", action="store_true", help="compile and train a small layer, too")


def run(options: argparse.Namespace) -> int:
    from fp8_compile.cli.machine import examine

    checks = examine(compile_a_model=options.compile)
    if options.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            sign, colour = SIGNS[check.status]
            print(coloured(sign, colour), safe(f"{check.name.ljust(width)}  {check.found}"))
            if check.remedy:
                print(" " * (len(sign) + 1 + width + 2) + coloured(check.remedy, "dim"))
    return int(any(check.status == "bad" for check in checks))
