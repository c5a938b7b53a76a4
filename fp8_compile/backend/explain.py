"""What the backend would do to a model, without training or compiling anything."""

from __future__ import annotations

import copy
import logging
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import fx, nn

from fp8_compile.config import Config
from fp8_compile.report import Report, merge
from fp8_compile.torch_internals.dynamo import compile_apart, sizes_as_given
from fp8_compile.torch_internals.graphs import LOOKS_AT_VALUES, FakeTensorMode, pytree
from fp8_compile.torch_internals.inductor import stop_after_joint
from fp8_compile.torch_internals.modules import unwrap

from .graph import compile_graph
from .interpret import NO_CACHE, run_uncompiled

log = logging.getLogger("fp8_compile")


def explain(
    model: nn.Module | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    config: Config | None = None,
) -> Report:
    """The report for ``model(*args, **kwargs)``: one row per matmul of forward and backward. ``str()`` is a table.

    The model runs on fake tensors: no number is computed, nothing is changed; it may be on the meta device. Only where
    its Python code looks at values (``if x.max() > 0``, data-dependent routing) does a copy that shares its parameters
    run forward once for real, with the random state put back afterwards.
    """
    module = unwrap(model)
    if not callable(module):
        raise TypeError(f"explain expects a module or a function, got {type(model).__name__}")
    config = config or Config()
    config = config.replace(inductor={**config.inductor, **NO_CACHE})
    args = args if isinstance(args, (tuple, list)) else (args,)
    try:
        reports = _trace_on_fakes(module, args, dict(kwargs or {}), config)
    except LOOKS_AT_VALUES as error:
        log.info("the model looks at values (%s): explaining it by one real forward", error)
        reports = _trace_for_real(module, args, dict(kwargs or {}), config)
    return merge(reports, cache="not compiled")


def _trace_on_fakes(module: Any, args: Sequence[Any], kwargs: dict[str, Any], config: Config) -> list[Report]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies = {id(tensor): _fake(mode, tensor) for tensor in _tensors(module, args, kwargs)}
    twin, args, kwargs = copy.deepcopy((module, args, kwargs), copies)
    with mode:
        return _trace(twin, args, kwargs, config)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in without data. A tensor on the meta device says nothing of where the model will run: on the CPU."""
    if tensor.device.type != "meta":
        return mode.from_tensor(tensor)
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _trace_for_real(module: Any, args: Sequence[Any], kwargs: dict[str, Any], config: Config) -> list[Report]:
    shared = {id(p): p for p in module.parameters()} if isinstance(module, nn.Module) else {}
    twin, args, kwargs = copy.deepcopy((module, args, kwargs), shared)
    with torch.random.fork_rng():
        return _trace(twin, args, kwargs, config)


def _trace(module: Any, args: Sequence[Any], kwargs: dict[str, Any], config: Config) -> list[Report]:
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # The report is complete with the joint graph; what comes after takes longer than all before.
        whole = any(isinstance(part, fx.GraphModule) for part in gm.children())
        inner_compile = run_uncompiled if whole else stop_after_joint
        compiled, report = compile_graph(gm, example_inputs, config, inner_compile=inner_compile, strict=False)
        reports.append(report)
        return compiled

    with sizes_as_given():
        compile_apart(module, backend)(*args, **kwargs)
    return reports


def _tensors(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Every tensor that the call can reach by name: parameters, buffers, tensors kept as attributes, arguments."""
    owned = [vars(sub) for sub in module.modules()] if isinstance(module, nn.Module) else []
    for leaf in pytree.tree_leaves((owned, args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            yield leaf
