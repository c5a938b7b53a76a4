"""The releases of torch and Triton that the wall is written for, which of them is running, and how they differ.

    torch    triton
    2.13     3.7
    2.14     3.8
    2.15     3.9

Code that must differ between releases asks a function of this file and never compares versions itself, so that
whoever drops a release finds here what can go. A newer release works as far as the checks hold that the code makes
of itself; an older one lacks what the passes rely on. ``docs/porting.md`` says how a release is added.
"""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import logging
import re

import torch

logger = logging.getLogger("fp8_compile")

Release = tuple[int, int]  # (2, 13) for every 2.13.x

# A release of torch -> the release of Triton that it is published with.
SUPPORTED: dict[Release, Release] = {(2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9)}
OLDEST, NEWEST = min(SUPPORTED), max(SUPPORTED)


class Standing(enum.Enum):
    """How a release stands to those that are supported."""

    OLDER = "older than every supported release"
    SUPPORTED = "supported"
    NEWER = "newer than every supported release: it works as far as the self-checks hold"


def release_of(version: str) -> Release:
    """(2, 15) for "2.15.0+cu132" and "2.15.0a0+git1234567"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"expected a version such as '2.15.0', got {version!r}")
    return int(found[1]), int(found[2])


def name_of(release: Release) -> str:
    """"2.15"."""
    return f"{release[0]}.{release[1]}"


def torch_release() -> Release:
    """The torch that is running."""
    return release_of(str(torch.__version__))


def triton_release() -> Release | None:
    """The Triton that is installed; None where there is none."""
    try:
        return release_of(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None


def standing_of(release: Release) -> Standing:
    """How a release of torch stands to those that are supported."""
    if release < OLDEST:
        return Standing.OLDER
    return Standing.NEWER if release > NEWEST else Standing.SUPPORTED


@functools.cache
def warn_of_newer_release() -> None:
    """Log one warning per process if torch is newer than every release that this package was tested with."""
    if standing_of(torch_release()) is Standing.NEWER:
        logger.warning(
            "torch %s is newer than %s, the newest release that fp8_compile was tested with: it works as far as the "
            "self-checks hold; `fp8-compile doctor` runs them",
            *(torch.__version__, name_of(NEWEST)),
        )


# ---- what differs ---------------------------------------------------------------------------------------------------


def interpreter_refuses_fnuz() -> bool:
    """Triton's interpreter does not know the FP8 formats of MI300."""
    return (triton_release() or (0, 0)) < (3, 8)


def interpreter_wants_boolean_masks() -> bool:
    """Triton's interpreter refuses masks of integers, which it makes itself where a comparison is broadcast."""
    return (triton_release() or (0, 0)) >= (3, 9)
