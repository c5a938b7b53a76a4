"""A module in one line, for tests that need a model with names and no class of their own."""

from __future__ import annotations

from typing import Any, Callable

from torch import nn


class ModuleOf(nn.Module):
    """``forward(self, *args)`` as a function, and what it finds in ``self``: modules, parameters, anything.

    ``ModuleOf(lambda self, x: self.layer(torch.sin(self.layer(x))), layer=nn.Linear(32, 32))``
    """

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)
