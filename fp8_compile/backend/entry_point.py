"""The backend: ``torch.compile(model, backend="fp8")``, or an object to ask afterwards what was done."""

from __future__ import annotations

import logging
from typing import Any, Callable, Mapping, Sequence

from torch import fx

from fp8_compile.config import Config
from fp8_compile.report import Report
from fp8_compile.torch_internals.releases import warn_of_newer_release

from .double_backward import reject_double_backward
from .graph import compile_graph

log = logging.getLogger("fp8_compile")


class Backend:
    """The backend as an object to ask: ``backend.reports`` has one report per compiled graph."""

    __name__ = "fp8"

    def __init__(self, config: Config | None = None) -> None:
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"Backend expects a Config, got {type(config).__name__}: write Backend(Config(...))")
        self.config = config or Config()
        self.reports: list[Report] = []

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if options:
            raise ValueError(f"options {sorted(options)} and a Backend object contradict: put them in its Config")
        warn_of_newer_release()
        compiled, report = compile_graph(gm, example_inputs, self.config, mode)
        self.reports.append(report)
        log.info("%s", report.summary())
        return reject_double_backward(compiled)


def fp8(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The entry point behind ``backend="fp8"``: a :class:`Backend` with the options of the call."""
    return Backend(Config.from_options(options))(gm, example_inputs, mode=mode)
