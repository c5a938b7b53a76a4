"""Change what a method of Inductor's does, where it offers no other way.

Each use says which release it was written for, and leaves the method as it is for everything that is not ours.
"""

from __future__ import annotations

import functools
from typing import Any, Callable


def extend(owner: type, *names: str) -> Callable[[Any], Any]:
    """Replace methods by a function that gets the original first, after ``self``."""

    def decorate(function: Any) -> Any:
        for name in names:
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(functools.partialmethod(function, original)))
        return function

    return decorate
