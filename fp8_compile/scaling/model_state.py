"""Everything that is known of a module between two steps, in one place.

A module has one :class:`ModelState`, whether it is compiled by itself, is a part of what is compiled, or is not
compiled at all: a training loop tells each module of its model what it asks for, and whatever is compiled of the model
finds it there. The state goes when the module goes.

Three things are not kept here because they do not belong to a module: the scaling states of functions that run no
module or several (``find_state.py``, by code and by group), the training loops (``training/attach.py``, by optimizer),
and the caches that an optimizer's step marks (``weight_cache.py``), which outlive their state while code reads them.
"""

from __future__ import annotations

import dataclasses
import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from .requests import Changes, Request, Requests

if TYPE_CHECKING:
    from .loss_scale import GraphLossScale, Scaled
    from .state import ScalingState


class CountsSteps(Protocol):
    """A training loop's count of its optimizer's steps."""

    steps: int


@dataclasses.dataclass(eq=False)
class ModelState:
    """What is known of one module. :func:`model_state` finds it."""

    # Delayed scaling.
    scaling: ScalingState | None = None  # made when it is first asked for
    requests: Requests = dataclasses.field(default_factory=Requests)
    step_counts: weakref.WeakSet[CountsSteps] = dataclasses.field(default_factory=weakref.WeakSet)
    frozen: frozenset[str] = frozenset()  # slots and layers in it whose scales are fixed for inference

    high: frozenset[str] = frozenset()  # its gemms that are in high precision for now: precision.py

    # The loss scale.
    loss_scalings: weakref.WeakSet[Scaled] = dataclasses.field(default_factory=weakref.WeakSet)  # of training loops
    # Those that graphs read. The same at every attach(), since code that was compiled for the first one reads them.
    graph_loss_scales: list[GraphLossScale] = dataclasses.field(default_factory=list)
    fixed_loss_scale: GraphLossScale | None = None  # by the options of torch.compile alone

    # Compiled code.
    has_code: bool = False
    treatments: dict[Any, Any] = dataclasses.field(default_factory=dict)  # by selection: see backend/variants.py
    unscaled_frames: set[CodeType] = dataclasses.field(default_factory=set)  # for training, without a loss scale
    has_fp8_matmul: bool = False  # in a graph of this module, or of one that it is in
    told_without_fp8: bool = False  # the user knows that there is none


scaling_states: weakref.WeakSet[ScalingState] = weakref.WeakSet()  # of all models and functions
_states: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()


def model_state(module: nn.Module) -> ModelState:
    """The state of a module, which is the user's, without what compiling and data parallelism put around it."""
    found = _states.get(module)
    return _states.setdefault(module, ModelState()) if found is None else found


class _NoPart:
    """Asks for something where no part of a training loop does."""


NO_PART = _NoPart()


def request(model: nn.Module, asker: object = NO_PART) -> Request:
    """What ``asker`` may change for a model and for modules in it that are compiled by themselves."""
    found = model_state(model).requests.of(asker)
    if found is None:
        found = Request()
        weakref.finalize(asker, Changes.note)  # the request ends with it
    for module in model.modules():
        model_state(module).requests.add(asker, found)
    return found
