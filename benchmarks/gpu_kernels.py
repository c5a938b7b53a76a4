"""What each GPU kernel costs on each target, read from its code; no GPU is needed.

    python benchmarks/gpu_kernels.py [--target cuda:90 ...] [--kernel quantize_many ...] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from fp8_compile.kernels.gpu.ahead_of_time import TARGETS, facts_of
from fp8_compile.kernels.gpu.catalogue import CATALOGUE

COLUMNS = ("registers", "shared_bytes", "spills", "wide_loads", "wide_stores", "narrow_stores", "fp8_conversions")


def main() -> None:
    """Compile, print a row a kernel and target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernel", nargs="+", choices=CATALOGUE, default=list(CATALOGUE))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()

    rows = []
    if not arguments.json:
        print(f"{'kernel':<25}{'target':<12}" + "".join(f"{name.replace('_', ' '):>17}" for name in COLUMNS))
    for kernel in arguments.kernel:
        for target in arguments.target:
            facts = dataclasses.asdict(facts_of(CATALOGUE[kernel]().compiled(target)))
            rows.append({"kernel": kernel, "target": target, **facts})
            if not arguments.json:
                print(f"{kernel:<25}{target:<12}" + "".join(f"{facts[name]:>17}" for name in COLUMNS), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
