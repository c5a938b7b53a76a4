"""Text on a terminal, whatever is in it: a module's name may hold escape sequences, a terminal may know no UTF-8."""

from __future__ import annotations

import contextlib
import os
import re
import sys

# Control characters but for the line's end, and those that change the direction of the text around them.
_ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
COLOURS = {"green": "32", "yellow": "33", "red": "31", "dim": "2"}


def prepare() -> None:
    """Let what the terminal can't show be escaped instead of being an error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # replaced by something without an encoding
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def safe(text: str) -> str:
    """The text with everything escaped that a terminal would act on."""
    return _ACTIVE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(text: str = "") -> None:
    print(safe(text), flush=True)


def complain(text: str) -> None:
    print(safe(text), file=sys.stderr, flush=True)


def coloured(text: str, colour: str) -> str:
    """The text made safe, and in colour if it goes to a terminal."""
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return safe(text) if plain else f"\x1b[{COLOURS[colour]}m{safe(text)}\x1b[0m"
