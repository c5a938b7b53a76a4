"""Inductor: how it is called, its configuration, its cache folder and its C++ compiler.

Everything is imported when it is used: Inductor takes seconds, which a process that only loads a package need not
spend.
"""

from __future__ import annotations

import operator
import shutil
from typing import Any, Callable, Iterable, Mapping, Sequence

from torch import fx


def compile_joint(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    inner_compile: Callable[..., Any] | None = None,
    *,
    whole: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph, forward and backward. ``inner_compile`` compiles each half; None: Inductor does.
    ``whole``: backward is compiled now, not when it first runs."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if inner_compile is stop_after_joint:
        return _only_joint(gm, inputs, patches)
    whole = whole or config.force_non_lazy_backward_lowering
    # Told to save memory (a budget, aggressive_recomputation), the partitioner takes operations that it does not know
    # for cheap, our gemms among them, unless it is to weigh these too.
    with config.patch(force_non_lazy_backward_lowering=whole, is_non_builtin_to_include=True):
        compiled: Any = compile_fx(
            gm, list(inputs), inner_compile=inner_compile or compile_fx_inner, config_patches=dict(patches)
        )
    return compiled


def stop_after_joint(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """An ``inner_compile`` for ``compile_joint`` which says that nothing is to be compiled.

    Once our passes have seen the joint graph, the rest is left out, and what comes back runs the Dynamo graph as it is.
    Of a pass that has a method ``only_decide``, no more than that is run. For graphs without subgraphs: Inductor does
    one subgraph after the other, and the graph itself last.
    """
    raise AssertionError("nothing is compiled after the joint graph")


class _JointGraphDone(Exception):
    """Our passes have seen the joint graph."""


def _only_joint(gm: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    from .custom_pass import CustomGraphPass

    class Stop(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            raise _JointGraphDone

        def uuid(self) -> None:
            return None

    passes = [*(getattr(one, "only_decide", one) for one in patches.get("joint_custom_pre_pass", ())), Stop()]
    try:
        compile_fx(gm, list(inputs), config_patches={**patches, "joint_custom_pre_pass": passes})
    except _JointGraphDone:
        return gm.forward
    raise AssertionError("a graph was compiled without our passes")


def compile_ahead_of_time(gm: fx.GraphModule, args: Any, kwargs: Any, options: Mapping[str, Any]) -> list[Any]:
    """The files that AOTInductor makes of a program."""
    from torch._inductor import aot_compile

    files = aot_compile(gm, args, kwargs, options=dict(options))
    assert isinstance(files, list)
    return files


def mode_options(mode: str) -> dict[str, Any]:
    """What ``torch.compile(mode=...)`` means for Inductor."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def passes_of_user(field: str, patches: Mapping[str, Any]) -> list[Any]:
    """The passes that a user has put into a field of Inductor's configuration, or into the options of this call."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    return list(get_custom_graph_passes(patches.get(field, getattr(config, field))))


def unknown_options(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that Inductor's configuration does not have, each with all names that it has."""
    from torch._inductor import config

    unknown = {}
    for name in names:
        try:
            operator.attrgetter(str(name).replace("-", "_"))(config)
        except AttributeError:
            unknown[name] = list(config.get_config_copy())
    return unknown


def unroll_threshold() -> int:
    """Up to how many elements Inductor makes a pointwise sum of a reduction."""
    from torch._inductor import config

    return config.unroll_reductions_threshold


def hash_of_files(files: Iterable[str]) -> str:
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(tuple(files)).hex()


def cache_folder() -> str:
    """The folder of Inductor's caches, which is made if it is not there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def file_lock(path: str, timeout: float) -> Any:
    """A lock between processes, as Inductor takes them. ``acquire()`` raises an OSError after ``timeout`` seconds."""
    from torch.utils._filelock import FileLock

    return FileLock(path, timeout=timeout)


class NoCompiler(Exception):
    """Inductor finds no C++ compiler that can be run."""


def cpp_compiler() -> str:
    """The C++ compiler that Inductor uses."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        found = cpp_builder.get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:  # OSError: what CXX names is there, but is not a program
        raise NoCompiler(str(error)) from error
    if len(found.split()) > 1 and shutil.which(found) is None:  # Inductor takes arguments since 2.14, our kernels don't
        raise NoCompiler(f"{found!r} is a compiler with arguments")
    return found


def cpp_compilers_searched() -> list[str]:
    """Where Inductor looks for a C++ compiler."""
    from torch._inductor import config

    searched = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else (config.cpp.cxx,)
    return [name for name in searched if name]
