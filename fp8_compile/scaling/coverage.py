"""Tell a user who asked for FP8 and gets none, once per model, with the reason and what to do about it."""

from __future__ import annotations

import collections
import logging
from typing import Iterable

from torch import fx, nn

from fp8_compile.block_stacks import is_kept
from fp8_compile.report import Report
from fp8_compile.torch_internals.dynamo import compiled_modules

from .model_state import model_state

log = logging.getLogger("fp8_compile")

# How reasons begin that the user has asked for.
BY_WISH = ("excluded", "not in include", "quantize_", "backward=", "set_precision(")
LAYERS = ("conv", "lstm", "gru", "rnn")  # in names of operations that multiply by weights in other ways


def note(gm: fx.GraphModule, report: Report) -> None:
    """A graph was compiled: remember which modules have FP8 matmuls now, or say that they have none."""
    modules = compiled_modules(gm)
    if report.rewritten:
        note_fp8(modules)
        return
    if any(map(_is_settled, modules)):
        return
    if (why := _why(gm, report)) is not None:
        for module in modules:
            model_state(module).told_without_fp8 = True
        name = type(modules[0]).__name__ if modules else "a compiled function"
        log.warning("backend='fp8' found no matmul of %s to run in FP8: %s", name, why)


def note_fp8(modules: Iterable[nn.Module]) -> None:
    """Code with FP8 matmuls runs for these."""
    for inner in (inner for module in modules for inner in module.modules()):
        model_state(inner).has_fp8_matmul = True


def note_step(model: nn.Module) -> None:
    """A first step was made with the model: say so if nothing of it runs in FP8."""
    if any(map(_is_settled, model.modules())):
        return
    model_state(model).told_without_fp8 = True
    log.warning(
        "%s made a training step, and no graph of it was compiled with backend='fp8': it trains in full precision. "
        "Either torch.compile was called on something else, for instance on a DDP wrapper around an nn.Sequential "
        "(compile the module first, then wrap it), or Dynamo gave up (an LSTM, too many recompilations): "
        "TORCH_LOGS=graph_breaks,recompiles tells",
        type(model).__name__,
    )


def _is_settled(module: nn.Module) -> bool:
    """True if there is nothing to tell: it has an FP8 matmul, or the user knows that it has none."""
    state = model_state(module)
    return state.has_fp8_matmul or state.told_without_fp8


def _why(gm: fx.GraphModule, report: Report) -> str | None:
    """Why a graph has no FP8 matmul; None: it multiplies by no weights, or the user wants it so."""
    if any(is_kept(row.reason) for row in report.skipped):
        return None  # a block that stays in high precision, compiled by itself
    reasons = collections.Counter(row.reason for row in report.skipped if not row.reason.startswith(BY_WISH))
    if reasons:
        common = "; ".join(f"{reason} ({count} of {len(report.skipped)})" for reason, count in reasons.most_common(3))
        return f"{common}. fp8_compile.explain(model, args) has a line for each"
    if report.skipped:
        return None
    layers = sorted({name for name in _operations(gm) if any(layer in name for layer in LAYERS)})
    if layers:
        return f"it has none. {', '.join(layers)} stay in full precision; FP8 is for linear layers and matmuls"
    return None


def _operations(gm: fx.GraphModule) -> Iterable[str]:
    for node in gm.graph.nodes:
        if node.op == "call_function":
            yield getattr(node.target, "__name__", str(node.target)).lower()
        elif node.op == "call_module":
            yield type(gm.get_submodule(str(node.target))).__name__.lower()
