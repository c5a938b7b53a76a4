"""JSON from files that anyone may have written: bounded in size and depth, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 256 * 2**20  # the graphs of a large model take some megabytes
MOST_DEPTH = 64


def read_json(path: Path, remedy: str, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a file; otherwise a ValueError that says what is wrong with it, and ``remedy``."""
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"{path} is not there, or not a file. {remedy}")
    if (size := path.stat().st_size) > most_bytes:
        raise ValueError(f"{path} has {size:,} bytes; expected at most {most_bytes:,}. {remedy}")
    return parse_json(path.read_bytes(), str(path), remedy)


def parse_json(text: bytes, where: str, remedy: str) -> dict[str, Any]:
    """The object that a text is; ``where`` names it in errors."""
    try:
        data = json.loads(text.decode("utf-8"))
    except ValueError as error:  # also numbers of thousands of digits, and bytes that are not UTF-8
        raise ValueError(f"{where} is not JSON: {error}. {remedy}") from None
    except RecursionError:
        data = None
        too_deep = True
    else:
        too_deep = _is_deeper(data, MOST_DEPTH)
    if too_deep:
        raise ValueError(f"{where} is nested more than {MOST_DEPTH} deep. {remedy}")
    if not isinstance(data, dict):
        raise ValueError(f"{where} holds {type(data).__name__}; expected an object. {remedy}")
    return data


def _is_deeper(data: Any, most: int) -> bool:
    level = [data]
    for _ in range(most + 1):
        containers = [one for one in level if isinstance(one, (dict, list))]
        if not containers:
            return False
        level = [inner for one in containers for inner in (one.values() if isinstance(one, dict) else one)]
    return True
