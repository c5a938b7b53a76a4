"""Run the benchmarks of a checkout: each prints a table against a peer, side by side in one run.

    fp8-compile bench                          all of them, which takes many minutes
    fp8-compile bench saved_bytes --json       one, for a machine
    fp8-compile bench train_cpu -- --layers 2  with arguments of its own

They are part of the repository, not of the installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fp8_compile
from fp8_compile.cli.terminal import complain, say

HELP = "run the benchmark tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones; all where none is named")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--json", action="store_true", help="print one JSON object: name -> rows, or text")


def run(options: argparse.Namespace) -> int:
    names, own = options.names, list[str]()
    scripts = find(checkout() / "benchmarks")
    if "--" in options.arguments:  # argparse drops it, and takes what follows for names
        own = options.arguments[options.arguments.index("--") + 1 :]
        names = names[: len(names) - len(own)]
    if unknown := [name for name in names if name not in scripts]:
        raise ValueError(f"no benchmark is called {', '.join(unknown)}; expected some of: {', '.join(scripts)}")
    if options.list:
        for name, script in scripts.items():
            say(f"{name:<16} {summary(script)}")
        return 0
    results = {name: measure(scripts[name], own, as_json=options.json) for name in names or scripts}
    if options.json:
        print(json.dumps({name: output for name, (_, output) in results.items()}, indent=2))
    failed = [name for name, (code, _) in results.items() if code]
    if failed:
        complain(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def checkout() -> Path:
    """The repository that this package is installed from."""
    root = Path(fp8_compile.__file__).resolve().parent.parent
    if not (root / "benchmarks").is_dir():
        raise ValueError(
            f"there is no benchmarks folder beside {root / 'fp8_compile'}: benchmarks are part of the repository. "
            "Clone it and run `pip install --editable .` there"
        )
    return root


def find(folder: Path) -> dict[str, Path]:
    """The scripts that can be run, by name."""
    return {path.stem: path for path in sorted(folder.glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")}


def summary(script: Path) -> str:
    return script.read_text(encoding="utf-8").removeprefix('"""').partition("\n")[0]


def measure(script: Path, own: list[str], *, as_json: bool) -> tuple[int, Any]:
    """Return the exit code and what it printed: parsed where it can print JSON, text otherwise. Without ``as_json`` its
    output is shown as it comes, and None is returned for it."""
    speaks_json = as_json and '"--json"' in script.read_text(encoding="utf-8")
    paths = [str(script.parent.parent / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, str(script), *own, *(["--json"] if speaks_json else [])]
    if not as_json:
        say(f"== {script.stem}")
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE if as_json else None,
        text=True,
    )
    if not as_json:
        return done.returncode, None
    try:
        return done.returncode, json.loads(done.stdout) if speaks_json else done.stdout
    except json.JSONDecodeError:
        return done.returncode or 1, done.stdout
