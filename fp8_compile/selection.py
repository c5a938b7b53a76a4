"""Which layers of a model are rewritten, by the patterns of the configuration and by what is an output head."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from typing import Iterator, Mapping, Sequence

from .output_heads import NAMED, OUTPUT_HEADS, own_name


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which layers are rewritten: include, less exclude, less output heads that were not asked for."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    heads: Mapping[str, str] = dataclasses.field(default_factory=dict)  # weight -> why it is that of an output head

    def check(self, known: Sequence[str]) -> None:
        """Raise unless every pattern matches something: a typo would rewrite what was meant to be spared."""
        for field, patterns in (("exclude", self.exclude), ("include", self.include)):
            for pattern in patterns:
                if pattern != "*" and not fnmatch.filter(known, pattern):
                    raise ValueError(
                        f"{field} pattern {pattern!r} matches no module or parameter of the model; "
                        f"nearest names: {', '.join(_nearest(pattern, known)) or 'the model has no named modules'}"
                    )

    def reason_against(self, module: str, weights: Sequence[str] = ()) -> str | None:
        """Why a layer is left alone, or None."""
        names = {name for start in (module, *weights) for name in _with_ancestors(start)}
        for pattern in self.exclude:
            if fnmatch.filter(names, pattern):
                return f"excluded by {pattern!r}"
        asked_for = [pattern for pattern in self.include if pattern == "*" or fnmatch.filter(names, pattern)]
        if not asked_for:
            return "not in include"
        why = next((self.heads[name] for name in weights if name in self.heads), None)
        if why is None and own_name(module) in OUTPUT_HEADS:
            why = NAMED
        return f"{why} (name it in include to rewrite it)" if why and asked_for == ["*"] else None


def _with_ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _nearest(pattern: str, known: Sequence[str]) -> list[str]:
    plain = pattern.replace("*", "").strip(".")
    return difflib.get_close_matches(plain, known, n=5, cutoff=0.3) or list(known[:5])
