"""Do something as soon as another library is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, run: Callable[[], None]) -> None:
    """Run it now where the library is imported already, otherwise right after its import."""
    if name in sys.modules:
        run()
    else:
        sys.meta_path.insert(0, _Watch(name, run))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds the one library as the other finders do, and runs something after its code; used once. To be found is not
    to be imported: ``importlib.util.find_spec`` is how programs ask whether a library is there."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name, self.run, self.searching = name, run, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name or self.searching or self not in sys.meta_path:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.run()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
