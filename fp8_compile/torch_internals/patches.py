"""Every function of torch and Triton that we replace, as a table.

A row of ``TABLE`` says which functions it replaces, for which releases and signatures it was written, what is wrong
without it, and when it can go. The functions that replace them are elsewhere and name their row:

    @extends("atomic_max", "torch._inductor.codegen.triton.TritonKernel.store")
    def _store(self, original, name, index, value, mode=None): ...

    if active("atomic_max"): ...                          ask before relying on it

A row is applied as a whole or not at all. Where the installed release or one of the signatures does not fit, it is left
out with one warning, and what is written in ``without`` happens: slower, but never wrong.

Not in this table: the instruction set of oneDNN, which is capped by an environment variable (``onednn.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from . import releases

log = logging.getLogger("fp8_compile")
Function = TypeVar("Function", bound=Callable[..., Any])
TORCH = tuple(map(releases.name_of, releases.SUPPORTED))
TRITON = tuple(map(releases.name_of, releases.SUPPORTED.values()))


@dataclasses.dataclass(frozen=True)
class Patch:
    """A row of the table."""

    functions: Mapping[str, tuple[str, ...]]  # full name -> the signatures that the replacement was written for
    releases: tuple[str, ...]  # of the package that the names begin with, without the patch number
    symptom: str  # what is wrong in these releases
    link: str  # where that is reported, or where to look
    until: str  # when the row can go
    without: str  # what happens where the row is left out


TABLE: dict[str, Patch] = {
    "atomic_max": Patch(
        functions={
            "torch._inductor.codegen.triton.TritonKernel.store": ("(self, name, index, value, mode=None)",),
            "torch._inductor.scheduler.Scheduler.fusable_read_and_write": (
                "(self, read, write, *, allow_index_equivalence=False)",
                "(self, read, write)",
            ),
        },
        releases=TORCH,
        symptom="Inductor names the store mode 'atomic_max' and does not implement it. Two such stores to one buffer "
        "are never fused: the scheduler compares the names that the buffer has before and after the first store.",
        link="none reported; torch/_inductor/ops_handler.py: AtomicMode, torch/_inductor/scheduler.py: "
        "Scheduler.fusable_read_and_write",
        until="Inductor's Triton code generator implements the mode",
        without="an amax on a GPU is a reduction of its own, a kernel or two, instead of a store in the kernel that "
        "computes the tensor",
    ),
    "tile_sum": Patch(
        functions={
            "torch._inductor.codegen.triton.TritonKernel.store": ("(self, name, index, value, mode=None)",),
            "torch._inductor.codegen.simd.SIMDScheduling.can_fuse_vertical": ("(self, node1, node2)",),
            "torch._inductor.codegen.simd.SIMDScheduling.can_fuse_horizontal": ("(self, node1, node2)",),
            "torch._inductor.choices.InductorChoices.triton_kernel_kwargs": (
                "(self, kernel_cls, features, groups, kernel_kwargs)",
            ),
        },
        releases=TORCH,
        symptom="Inductor has no store that sums a tile: the gradient of a bias is a reduction, a kernel of its own "
        "that reads the gradient again.",
        link="none reported; torch/_inductor/ops_handler.py: StoreMode",
        until="Inductor fuses a sum over rows into the pointwise kernel that computes them",
        without="a bias's gradient on a GPU is a reduction of its own",
    ),
    "peak_estimate": Patch(
        functions={"torch._inductor.codegen.wrapper.EfficientPeakEstimate.__init__": ("(self)",)},
        releases=TORCH,
        symptom="Inductor's estimate of peak memory counts buffers that fusion has removed. It then keeps dead buffers "
        "for later ones of their size: the backward of a SwiGLU in FP8 held 85.0 MB where 76.6 would do.",
        link="none reported; torch/_inductor/codegen/wrapper.py: AllocateLine.should_reuse_buffer",
        until="the estimate leaves out V.graph.removed_buffers",
        without="a step may hold more memory than it needs",
    ),
    "min_max": Patch(
        functions={
            "torch._inductor.codegen.triton.TritonOverrides.minimum": ("(a, b)",),
            "torch._inductor.codegen.triton.TritonOverrides.maximum": ("(a, b)",),
        },
        releases=TORCH,
        symptom="From 2.14 on Inductor clamps by min.NaN and max.NaN. Beside stores of single bytes, as of FP8, Triton "
        "miscompiles them, seen as rare NaNs.",
        link="https://github.com/triton-lang/triton/issues/11111; the same cure: https://github.com/pytorch/ao/pull/4657",
        until="that issue is closed in every supported Triton",
        without="as Inductor has it: with torch 2.14 and newer, FP8 tensors on a GPU may get NaNs now and then",
    ),
    "loop_split": Patch(
        functions={"torch._inductor.codegen.cpp.CppScheduling.try_loop_split": ("(self, nodes)",)},
        releases=TORCH,
        symptom="AssertionError: ({y0: 512, y1: 8, y2: 128}, {y0: 1024, y1: 4, y2: 128}) in "
        "CppScheduling.try_loop_split: fused loops over tensors of different shapes that both divide an index by 128 "
        "are split one by one, and then must be alike. Worse, a loop of 144 that divides its index by 128 becomes one "
        "of 144 // 128 times 128, and its last 16 elements are never written.",
        link="none reported; the split came with https://github.com/pytorch/pytorch/pull/132389",
        until="Inductor checks that the loops have equal shapes, which the split divides, before it splits them",
        without="blockwise is skipped on CPUs: its generated code would be wrong",
    ),
    "cheap_ops": Patch(
        functions={
            "torch._functorch.partitioners.get_default_op_list": ("()",),
            "torch._functorch.partitioners.is_non_builtin_to_include": ("(node)",),
        },
        releases=TORCH,
        symptom="The partitioner has a list of operations that are cheap, and saves for backward whatever another "
        "one returns or reads. A quantize then has to be some twenty plain operations until the graph is split: "
        "compiling a whole model for a CPU took 1.6 times as long as without us.",
        link="none reported; torch/_functorch/partitioners.py: get_default_op_list",
        until="an operation can be registered or tagged as one that is cheap to compute again",
        without="models take longer to compile for a CPU, and the code is the same",
    ),
    "interpreter": Patch(
        functions={
            "triton.runtime.interpreter._convert_float": ("(input, input_dtype, output_dtype, rounding_mode)",),
            "triton.runtime.interpreter._patch_lang_core": ("(lang, scope)",),
            "triton.runtime.interpreter.InterpreterBuilder.create_dot": (
                "(self, a, b, d, input_precision, max_num_imprecise_acc)",
            ),
            "triton.runtime.interpreter.InterpreterBuilder.create_splat": ("(self, ret_ty, arg)",),
        },
        releases=TRITON,
        symptom="Under TRITON_INTERPRET=1, 125.7 becomes 64 in E4M3, ties round up, FNUZ formats are refused (3.7), a "
        "dot of bf16 multiplies bits as if they were integers, and masks with compared scalars are refused (3.9).",
        link="https://github.com/triton-lang/triton/issues/8322, https://github.com/triton-lang/triton/issues/11584",
        until="every supported Triton has both issues closed and knows the FNUZ types in its interpreter",
        without="FP8 kernels give other bytes in the interpreter than on a GPU; compiled kernels are not concerned",
    ),
}

_left_out: set[str] = set()  # rows that are left out on request
_warned: set[str] = set()
_extended: set[tuple[str, str]] = set()  # (row, function)


def why_not(name: str) -> str | None:
    """Why a row is left out; None if it fits."""
    return "left out on request" if name in _left_out else _misfit(name)


def fits(name: str) -> bool:
    """True if a row can be applied. The first time that it can't, a warning says why and what follows."""
    reason = why_not(name)
    if reason is not None and name not in _warned:
        _warned.add(name)
        log.warning(
            "a correction of %s is left out (%s: %s). What follows: %s",
            *(_package(TABLE[name]), name, reason, TABLE[name].without),
        )
    return reason is None


def active(name: str) -> bool:
    """True if a row fits and all of its functions have been replaced by :func:`extends`."""
    return fits(name) and all((name, function) in _extended for function in TABLE[name].functions)


def left_out() -> tuple[str, ...]:
    """The rows that don't fit, for the keys of caches: generated code depends on them."""
    return tuple(name for name in TABLE if why_not(name) is not None)


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Leave a row out for the length of a block, as if the installed release did not fit."""
    before = name in _left_out
    _left_out.add(name)
    _warned.discard(name)
    try:
        yield
    finally:
        if not before:
            _left_out.discard(name)


def extends(name: str, *functions: str) -> Callable[[Function], Function]:
    """Replace methods of a row by a function that gets the original as its second argument, after ``self``; that of a
    static method, or of a module, gets it first.

    While the row is left out, the original is called. Functions of the row that are not replaced yet keep the row from
    being active.
    """

    def decorate(function: Function) -> Function:
        for full_name in functions:
            assert full_name in TABLE[name].functions, f"{full_name} is not in the row {name!r}"
            if fits(name):
                owner, attribute = _place(full_name)
                static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
                no_self = static or inspect.ismodule(owner)
                made = _replacement(name, getattr(owner, attribute), function, no_self)
                setattr(owner, attribute, staticmethod(made) if static else made)
                _extended.add((name, full_name))
        return function

    return decorate


def _replacement(
    name: str, original: Callable[..., Any], function: Callable[..., Any], no_self: bool = False
) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if why_not(name) is not None:
            return original(*args, **kwargs)
        return function(original, *args, **kwargs) if no_self else function(args[0], original, *args[1:], **kwargs)

    return replaced


@functools.cache
def _misfit(name: str) -> str | None:
    patch = TABLE[name]
    package = _package(patch)
    try:
        installed = str(importlib.import_module(package).__version__)
    except ImportError:
        return f"{package} is not installed"
    if ".".join(installed.split(".")[:2]) not in patch.releases:
        return f"written for {package} {', '.join(patch.releases)}, found {installed}"
    for full_name, signatures in patch.functions.items():
        try:
            owner, attribute = _place(full_name)
            found = _signature(getattr(owner, attribute))
        except (ImportError, AttributeError):
            return f"{package} {installed} has no {full_name}"
        if found not in signatures:
            return f"written for {full_name}{' or '.join(signatures)}, found {found}"
    return None


def _package(patch: Patch) -> str:
    return next(iter(patch.functions)).partition(".")[0]


def _place(full_name: str) -> tuple[Any, str]:
    """The module or class that has a function, and the function's name there."""
    *parts, attribute = full_name.split(".")
    owner: Any = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if inspect.ismodule(owner) and not hasattr(owner, part):
            importlib.import_module(".".join(parts[:depth]))
        owner = getattr(owner, part)
    return owner, attribute


def _signature(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults of the parameters. Types are left out: they change with imports and quotes."""
    signature = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
