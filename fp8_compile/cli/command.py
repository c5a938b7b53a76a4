"""``fp8-compile VERB ...``: find the verb, run it, and turn mistakes of the user into one line.

Exit codes: 0 all is well, 1 the verb's own answer (a check failed, two reports differ), 2 a mistake, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import traceback
from types import ModuleType
from typing import Sequence

from fp8_compile import __version__

from . import verbs
from .terminal import complain, prepare

MISTAKE, INTERRUPTED = 2, 130
BROKEN_PIPE = 141  # what a shell reports for a program that writes to a reader who has left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    prepare()
    parser = make_parser()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError) as error:
        if options.traceback:
            traceback.print_exc()
        complain(f"{parser.prog} {options.verb}: {type(error).__name__ if not str(error) else error}")
        return MISTAKE


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8-compile",
        description='See, check and compare what torch.compile(model, backend="fp8") does.',
        epilog="fp8-compile VERB --help tells more of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"fp8_compile {__version__}")
    parser.set_defaults(traceback=False)
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in all_verbs().items():
        description = (verb.__doc__ or "").strip()
        one = subparsers.add_parser(
            name, help=verb.HELP, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        one.add_argument("--traceback", action="store_true", help="show where an error comes from")
        verb.add_arguments(one)
        one.set_defaults(run=verb.run)
    return parser


def all_verbs() -> dict[str, ModuleType]:
    """Every module in ``verbs/``."""
    names = sorted(module.name for module in pkgutil.iter_modules(verbs.__path__))
    return {name.rstrip("_"): importlib.import_module(f"{verbs.__name__}.{name}") for name in names}
