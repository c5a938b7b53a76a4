"""Which layers of a model are rewritten, by the patterns of the configuration and by what is an output head."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from typing import Iterator, Mapping, Sequence

from .output_heads import NAMED, OUTPUT_HEADS, own_name


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which layers are rewritten: include, less exclude, less blocks and output heads that were not asked for."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    heads: Mapping[str, str] = dataclasses.field(default_factory=dict)  # weight -> why it is that of an output head
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)  # module -> why its block is left alone
    asked_for: tuple[str, ...] = ()  # patterns of include that name some blocks and not others

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
            if _matches(names, (pattern,)):
                return f"excluded by {pattern!r}"
        asked_for = [pattern for pattern in self.include if pattern == "*" or _matches(names, (pattern,))]
        if not asked_for:
            return "not in include"
        if (kept := self._reason_to_keep(module, weights)) and not _matches(names, self.asked_for):
            return kept
        why = next((self.heads[name] for name in weights if name in self.heads), None)
        if why is None and own_name(module) in OUTPUT_HEADS:
            why = NAMED
        return f"{why} (name it in include to rewrite it)" if why and asked_for == ["*"] else None

    def _reason_to_keep(self, module: str, weights: Sequence[str]) -> str | None:
        """Why the block of a layer is left alone. A product that was written outside of blocks is in its weight's."""
        if not self.kept:
            return None
        inside = [weight for weight in weights if not module or weight.startswith(f"{module}.")]
        places = ("", *(name for start in (module, *inside) for name in _with_ancestors(start)))
        return next((self.kept[name] for name in places if name in self.kept), None)


def _matches(names: set[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.filter(names, pattern) for pattern in patterns)


def _with_ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _nearest(pattern: str, known: Sequence[str]) -> list[str]:
    plain = pattern.replace("*", "").strip(".")
    return difflib.get_close_matches(plain, known, n=5, cutoff=0.3) or list(known[:5])
