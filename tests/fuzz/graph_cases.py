"""One case of the fuzzer of graphs: a random model under a random config, how it is called, and what is asked of it."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import linecache
import random
from typing import Any, Callable, Sequence

import random_pieces  # noqa: F401  registers pieces
import torch
from comparison import ALLOWED_DB, Gap, find_gaps
from joint_graph import assert_gpu_accepts, reference_scaled_mm
from lost_numbers import Warnings, counted
from random_models import TOKENS, Writer, source, write_model
from simulated_fp8 import BUFFER, GRADIENT, INPUT, PARAMETER, SimulatedFp8
from torch import Tensor, fx, nn
from uncompiled import UncompiledBackend

from fp8_compile import Backend, Config
from fp8_compile.backend.graph import compile_graph
from fp8_compile.backend.interpret import run_uncompiled

MOST_PIECES = 8
# One bf16 rounding has 56 dB, and a model has dozens that fall by luck; one FP8 gemm has 28. Beyond this no one counts.
MOST_DB_IN_BF16 = 36.0
OTHER_SHAPE = (4, 24)
Results = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that is drawn. ``pieces``: seeds of the model's pieces."""

    seed: int
    pieces: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int
    dtype: torch.dtype
    autocast: bool
    layout: str
    input_grad: bool
    magnitude: float
    calls: int
    poison: float | None
    options: dict[str, Any]
    compiled: bool = False

    @classmethod
    def draw(cls, seed: int, *, compiled: bool = False) -> Case:
        rng = random.Random(seed)
        pieces = tuple(rng.randrange(1 << 30) for _ in range(rng.randint(1, MOST_PIECES)))
        bf16 = rng.random() < 0.3
        options = draw_options(rng, compiled)
        return cls(
            seed,
            pieces,
            rng.choice(TOKENS),
            rng.choice((32, 16, 48, 64, 40, 33, 130, 24)),
            torch.bfloat16 if bf16 else torch.float32,
            not bf16 and rng.random() < 0.2,
            rng.choice(("contiguous", "contiguous", "transposed", "strided", "offset")),
            rng.random() < 0.7,
            rng.choice((1.0, 1.0, 1.0, 1e-3, 50.0)),
            rng.choice((1, 1, 2, 3)),
            rng.choice((None, None, float("inf"), float("-inf"), float("nan"))),
            options,
            compiled,
        )

    def writer(self) -> Writer:
        return write_model(self.tokens, self.width, self.pieces)

    def config(self, writer: Writer) -> Config:
        options = dict(self.options)
        if (which := options.pop("excludes", None)) is not None:
            options["exclude"] = (writer.names[which % len(writer.names)],)
        return Config(**options)


def draw_options(rng: random.Random, compiled: bool) -> dict[str, Any]:
    def maybe(share: float, **values: Any) -> dict[str, Any]:
        return values if rng.random() < share else {}

    recipe = rng.choice(("delayed", "tensorwise", "rowwise", "blockwise"))
    targets = ("cpu", "cpu", "cuda:90", "cuda:90", "cuda:100", "hip:gfx942")
    target = "cpu" if compiled else rng.choice(targets[:4] if recipe == "blockwise" and rng.random() < 0.9 else targets)
    return {
        "recipe": recipe,
        "target": target,
        **maybe(0.3, backward_format=rng.choice(("e4m3", "e5m2"))),
        **maybe(0.1, forward_format="e5m2"),
        **maybe(0.4, min_dim=rng.choice((1, 4, 32, 48))),
        **maybe(0.2, excludes=rng.randrange(100)),
        **maybe(0.15, **{f"quantize_{rng.choice(('inputs', 'weights', 'gradients'))}": False}),
        **maybe(0.2, loss_scale=rng.choice((1024.0, 65536.0, 3.0, 0.25))),
        **(maybe(0.3, margin=rng.choice((1, 2))) if recipe == "delayed" else {}),
        **(maybe(0.2, amax_history_len=rng.choice((1, 4))) if recipe == "delayed" else {}),
    }


class InterpretedBackend(UncompiledBackend):
    """Products for GPUs as they are defined, in FP64, because torch has no blockwise one for CPUs. Those for CUDA are
    ones that torch and cuBLAS accept."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, report = compile_graph(gm, example_inputs, self.config, inner_compile=self._interpret)
        self.reports.append(report)
        return compiled

    def _interpret(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        if str(self.config.target).startswith("cuda"):
            assert_gpu_accepts(gm.graph)
        if str(self.config.target) != "cpu":
            for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default):
                node.target = reference_scaled_mm
            gm.recompile()
        return run_uncompiled(gm, example_inputs, **kwargs)


# ---- a call ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Call:
    """Inputs of one call; they are copied for each model that gets them."""

    case: Case
    shape: tuple[int, ...]
    number: int
    poison: float | None = None

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.case.seed + self.number)
        x = torch.randn(self.shape, generator=generator) * self.case.magnitude
        other = torch.randn(OTHER_SHAPE, generator=generator) * self.case.magnitude
        x, other = (one.to(self.case.dtype).to(dtype) for one in (x, other))
        if self.poison is not None:
            x.view(-1)[self.case.seed % x.numel()] = self.poison
        x = in_layout(x, self.case.layout)
        return [one.requires_grad_(self.case.input_grad) for one in (x, other)]

    def grads(self, outputs: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.number)
        drawn = [torch.randn(one.shape, generator=generator) for one in outputs]
        return [one.bfloat16().to(output.dtype) for one, output in zip(drawn, outputs)]


def in_layout(x: Tensor, layout: str) -> Tensor:
    """The same values, lying otherwise in memory."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "offset":
        return torch.cat([x.new_zeros(*x.shape[:-1], 3), x], -1)[..., 3:]
    return x


def results(model: Any, call: Call, dtype: torch.dtype, *, autocast: bool, mode: SimulatedFp8 | None = None) -> Results:
    """Outputs and gradients; all of them below ``mode``, if there is one."""
    inputs = call.inputs(dtype)
    model.zero_grad()
    with contextlib.ExitStack() as stack:
        if mode is not None:
            for one in inputs:
                mode.mark(one, INPUT)
            stack.enter_context(mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = list(model(*inputs))
        with_gradient = [one for one in outputs if one.requires_grad]
        grads = call.grads(with_gradient)
        if mode is not None:
            mode.in_backward = True
            for one in grads:
                mode.mark(one, GRADIENT)
        if with_gradient:
            torch.autograd.backward(with_gradient, grads)
    found = {"output" if not index else f"output {index}": one for index, one in enumerate(outputs)}
    found |= {f"grad of input {index}": one.grad for index, one in enumerate(inputs)}
    for name, parameter in model.named_parameters():
        found[f"grad of {name.removeprefix('_orig_mod.')}"] = parameter.grad
    return {name: one.detach().clone() for name, one in found.items() if one is not None}


# ---- a case ---------------------------------------------------------------------------------------------------------


class Failure(AssertionError):
    """A case that is not as it should be."""


class NoModel(Exception):
    """What was drawn does not run in eager mode."""


@dataclasses.dataclass
class Seen:
    """What a case that passed was about."""

    rewritten: int = 0
    skipped: int = 0
    tensors: int = 0
    said: int = 0
    reasons: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class CaseRun:
    """One case: the compiled model, its twin in FP64, and the simulation."""

    def __init__(self, case: Case) -> None:
        self.case, self.writer = case, case.writer()
        self.config = case.config(self.writer)
        torch._dynamo.reset()
        torch.manual_seed(case.seed)
        self.model = load(source(self.writer), f"<random model {case.seed} {hash(case.pieces)}>")().to(case.dtype)
        self.simulated = copy.deepcopy(self.model)
        self.simulated.recomputes = False
        self.twin = copy.deepcopy(self.model).double()
        self.twin.recomputes, self.twin.low, self.twin.casts = False, torch.float64, False
        self.backend = Backend(self.config) if case.compiled else InterpretedBackend(self.config)
        self.compiled = torch.compile(self.model, backend=self.backend, dynamic=False)
        self.seen = Seen()

    def run(self) -> Seen:
        case, shape = self.case, self.writer.first_shape
        self._check_model(Call(case, shape, 0))
        for number in range(case.calls):
            self._check(Call(case, shape, number))
        if case.poison is not None and 0 not in shape:
            self._check_poisoned(Call(case, shape, 50, case.poison))
            self._check(Call(case, shape, 0))
        rows = [row for report in self.backend.reports for row in report.rows]
        self.seen.rewritten = sum(row.rewritten for row in rows)
        self.seen.skipped = len(rows) - self.seen.rewritten
        self.seen.reasons.update(row.reason.split(",")[0] for row in rows if not row.rewritten)
        return self.seen

    def _check_model(self, call: Call) -> None:
        """What eager mode refuses, or gives no finite number for, is no model to compile."""
        try:
            eager = results(self.simulated, call, self.case.dtype, autocast=self.case.autocast)
        except RuntimeError as error:
            raise NoModel(str(error)) from error
        if not all(one.isfinite().all() for one in eager.values()):
            raise NoModel("not finite in eager mode")

    def _engine(self, call: Call) -> Results:
        graphs = len(self.backend.reports)
        found = results(self.compiled, call, self.case.dtype, autocast=self.case.autocast)
        if call.number and len(self.backend.reports) != graphs:
            raise Failure("a call of the same sizes compiled again")
        return found

    def _check(self, call: Call) -> None:
        before = counted(self.model)
        with Warnings() as warnings:
            found = self._engine(call)
        said = [*(counted(self.model) - before), *warnings.messages]
        exact = results(self.twin, call, torch.float64, autocast=False)
        eager = results(self.simulated, call, self.case.dtype, autocast=self.case.autocast)
        for name, tensor in eager.items():
            if name in found and (found[name].dtype, found[name].shape) != (tensor.dtype, tensor.shape):
                raise Failure(f"{name} is {found[name].dtype} {found[name].shape}, eager {tensor.dtype} {tensor.shape}")
        lost = [one for one in said if one.endswith((" saturated", " small"))]
        gaps = find_gaps(found, exact, lambda luck: self._simulate(call, luck), excused=bool(lost))
        self.seen.tensors += len(gaps)
        worse = [gap for gap in gaps if self._is_failure(gap)]
        if lost:
            self.seen.said += bool(worse)
        elif worse:
            raise Failure(f"call {call.number}: {'; '.join(map(str, worse))}")
        self._check_untouched(found, exact, eager)

    def _is_failure(self, gap: Gap) -> bool:
        most = MOST_DB_IN_BF16 if self._is_low else float("inf")
        return min(gap.simulated_db, most) - gap.engine_db > ALLOWED_DB

    @property
    def _is_low(self) -> bool:
        """Whether some of the model is in 16 bits."""
        text = "\n".join(self.writer.forward)
        rounds = self.config.recipe in ("rowwise", "blockwise") and str(self.config.target) != "cpu"
        return self.case.dtype is torch.bfloat16 or self.case.autocast or "low" in text or "casts" in text or rounds

    def _check_untouched(self, found: Results, exact: Results, eager: Results) -> None:
        """Tensors of which the simulation says nothing, because it gets them no better than noise, are finite."""
        for name in exact:
            if exact[name].isfinite().all() and eager[name].isfinite().all() and not found[name].isfinite().all():
                raise Failure(f"{name} is not finite, FP64's and eager's are")

    def _simulate(self, call: Call, luck: torch.Generator | None) -> Results:
        origins = {PARAMETER: list(self.simulated.parameters()), BUFFER: list(self.simulated.buffers())}
        mode = SimulatedFp8(self.config, self.backend.reports, origins, luck)
        found = results(self.simulated, call, self.case.dtype, autocast=self.case.autocast, mode=mode)
        mode.check_all_seen()
        if mode.forgotten:
            raise Failure(f"a product with a weight was skipped: {mode.forgotten}")
        return found

    def _check_poisoned(self, call: Call) -> None:
        found = self._engine(call)
        exact = results(self.twin, call, torch.float64, autocast=False)
        for name in exact:
            lost = found[name].isfinite() & ~exact[name].isfinite()
            if lost.any():
                raise Failure(f"{call.poison} in the input: {name} is finite where FP64's is not ({int(lost.sum())})")


def load(text: str, file: str) -> type[nn.Module]:
    """The class ``Model`` of a source; its lines can be seen in stack traces and reports."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": "random_model"}
    exec(compile(text, file, "exec"), namespace)
    return namespace["Model"]
