"""Export a model ahead of time: ``fp8_compile.export(model, args, "model.pt2", weights="nvfp4")``.

    model -> pack a copy -> torch.export -> our passes in AOTInductor -> one .pt2 with a manifest

The package holds packed weights and native code: Inductor's, and the kernels of ``kernels/cpu`` linked into it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pathlib
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from fp8_compile.backend.fused_inference_ops import decompose_fused_ops
from fp8_compile.backend.graph import new_dump, with_users
from fp8_compile.backend.module_names import ModuleNames
from fp8_compile.config import Config
from fp8_compile.kernels.cpu import ahead_of_time
from fp8_compile.packing.calibration import Calibration
from fp8_compile.packing.formats import FORMATS
from fp8_compile.packing.linear_layers import unwrapped
from fp8_compile.packing.pack import pack
from fp8_compile.packing.packed_linear import PackedLinear
from fp8_compile.packing.packed_weight import PackedWeight
from fp8_compile.report import Report
from fp8_compile.torch_internals.graphs import pytree
from fp8_compile.torch_internals.inductor import compile_ahead_of_time
from fp8_compile.torch_internals.packages import write_package
from fp8_compile.whole_files import written_in_scratch

from .inputs import PLAIN, describe
from .manifest import FILE, Manifest, here
from .pipelines import ExportJoint, ExportSplit, inference_rules
from .program import rewritten, traced, writes_a_number

log = logging.getLogger("fp8_compile")


def export(
    model: nn.Module,
    args: Sequence[Any],
    path: str | os.PathLike[str] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    weights: str | None = None,
    *,
    calibration: Calibration | None = None,
    dynamic_shapes: Any = None,
    format: str = "package",
    dump: str | os.PathLike[str] | None = None,
    inductor: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report | ExportedProgram:
    """Write a package that ``fp8_compile.load``, or libtorch's ``AOTIModelPackageLoader``, runs, and return a report.

    ``weights``: "nvfp4" or "fp8" packs a copy of the model first, with ``calibration`` and with ``options``, which are
    ``pack``'s; None takes the model as it is, packed or not. Products with packed weights run from the packed form,
    all others in the model's own precision. ``weights="fp8", activations="fp8"`` multiplies FP8 by FP8, inputs by
    the calibration's static scales or, without one, each row by its own amax. ``args`` and ``kwargs`` are an example
    of a call; ``dynamic_shapes`` says which of their sizes vary, as for ``torch.export.export``. ``dump`` and
    ``inductor`` are the backend's options: a folder for graphs and report, overrides of Inductor's config.

    The code is for this CPU and those that have its instructions. The file appears whole or not at all.

    ``format="exported_program"`` writes and compiles nothing and returns the rewritten ``ExportedProgram``.
    """
    if format not in ("package", "exported_program"):
        raise ValueError(f"format={format!r} is unknown; expected 'package' or 'exported_program'")
    config = Config(recipe="tensorwise", dump=dump, inductor=inductor or {})  # type: ignore[arg-type]
    if format == "exported_program":
        if path is not None:
            raise ValueError("format='exported_program' returns the program and writes nothing; leave path out")
        packed = _packed(model, weights, calibration, options)
        return rewritten(traced(packed, args, kwargs, dynamic_shapes), _names(packed), config)
    if path is None:
        raise ValueError("export writes a package and needs a path for it, such as 'model.pt2'")
    path = pathlib.Path(path)
    if path.suffix != ".pt2":
        raise ValueError(f"path: expected a name that ends in .pt2, as torch's packages do, got {str(path)!r}")
    packed = _packed(model, weights, calibration, options)
    _check_model(packed)
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))  # as load gives them to the code
    program = traced(packed, args, kwargs, dynamic_shapes)
    described = describe(program)
    files, report = _compiled(program, _names(packed), config)
    chosen = {**options, **({"inductor": config.inductor} if inductor else {})}
    manifest = Manifest(
        **here(),
        cpu_features=tuple(ahead_of_time.needed_features()),
        weights=weights,
        options={name: value if isinstance(value, PLAIN) else repr(value) for name, value in chosen.items()},
        report=report,
        inputs=tuple(described["inputs"]),
        ranges=described["ranges"],
        calibration=_summary(calibration, packed),
    )
    _write(path, files, manifest)
    log.info("exported to %s: %s", path, report.summary())
    return report


def _packed(
    model: nn.Module, weights: str | None, calibration: Calibration | None, options: dict[str, Any]
) -> nn.Module:
    root = unwrapped(model)
    if not isinstance(root, nn.Module):
        raise TypeError(f"export expects a module, got {type(model).__name__}")
    training = next((name or "the model" for name, module in root.named_modules() if module.training), None)
    if training:
        raise ValueError(f"{training} is in training mode, where dropout drops; call model.eval() before export")
    if weights is None:
        given = [*options, *(["calibration"] if calibration is not None else [])]
        if given:
            raise ValueError(f"{', '.join(given)}: for packing, but weights=None packs nothing; say weights='nvfp4'")
        return root
    if weights not in tuple(FORMATS):
        raise ValueError(f"weights={weights!r} is unknown; expected None or one of: {', '.join(FORMATS)}")
    twin = copy.deepcopy(root)
    pack(twin, weights, calibration=calibration, **{"progress": False, **options})
    return twin


def _check_model(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; export is for CPUs so far: move the model with .cpu()")
    for name, layer in model.named_modules():
        reason = layer.reason_against_export() if isinstance(layer, PackedWeight) else None
        if reason is not None:
            raise ValueError(f"{name}: {reason}")


def _names(model: nn.Module) -> ModuleNames:
    return ModuleNames({}, [], [name for name, _ in model.named_modules()])


def _compiled(program: ExportedProgram, names: ModuleNames, config: Config) -> tuple[list[Any], Report]:
    """The files that AOTInductor makes of a program, and what our passes did."""
    gm = program.module(check_guards=False)
    assert isinstance(gm, fx.GraphModule)
    decompose_fused_ops(gm)
    dump, rules = new_dump(config, names), inference_rules(config)
    joint, split = ExportJoint(rules, names, dump), ExportSplit(rules, dump)
    library = ahead_of_time.linkable()
    configs = {
        **config.inductor,
        "aot_inductor.package": True,
        "aot_inductor.custom_ops_to_c_shims": ahead_of_time.SHIMS,
        "aot_inductor.custom_op_libs": [library.name.removeprefix("lib").removesuffix(".a")],
        "joint_custom_pre_pass": with_users("joint_custom_pre_pass", joint, config.inductor),
        "post_grad_custom_pre_pass": with_users("post_grad_custom_pre_pass", split, config.inductor),
    }
    if writes_a_number(program):  # folding takes a buffer of one number for a constant, even where it is written to
        configs["joint_graph_constant_folding"] = False
    args, kwargs = program.example_inputs
    with torch.no_grad(), _library_path(library.parent):
        files = compile_ahead_of_time(gm, args, kwargs, configs)
    report = Report(tuple(joint.rows), "packed", "cpu", cache="off")
    if dump:
        dump.write_report(report)
    return files, report


@contextlib.contextmanager
def _library_path(folder: pathlib.Path) -> Iterator[None]:
    """Let the compiler find libraries in a folder; Inductor has no option for that."""
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["LIBRARY_PATH"]
        else:
            os.environ["LIBRARY_PATH"] = before


def _write(path: pathlib.Path, files: list[Any], manifest: Manifest) -> None:
    """Write it under its own name in another folder first: the archive's inner names come from the file's."""
    with written_in_scratch(path) as scratch:
        write_package(scratch, files, {FILE: manifest.to_json()})


def _summary(calibration: Calibration | None, packed: nn.Module) -> dict[str, Any] | None:
    """What the calibration saw of each layer: how many rows, the largest element, and how inputs are scaled by it."""
    if calibration is None:
        return None
    inputs = {name: layer.inputs for name, layer in packed.named_modules() if isinstance(layer, PackedLinear)}
    return {
        name: {
            "rows": calibration.tokens(name),
            "amax": float(calibration.amax(name)),
            **({"inputs": inputs[name]} if inputs.get(name) else {}),
        }
        for name in calibration.names
    }
