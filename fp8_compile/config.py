"""The options of the backend, checked once when they are given."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from typing import Any, Mapping

from .target import Target
from .torch_internals.inductor import unknown_options

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
FORMATS = ("e4m3", "e5m2")
BACKWARD = ("quantized", "high_precision", "dequantized")
AMAX_ALGORITHMS = ("max", "most_recent", "p99")
# Gradients span more orders of magnitude than a whole tensor's E4M3 holds; a row or a block spans fewer.
BACKWARD_FORMATS = {
    "tensorwise": "e5m2",
    "delayed": "e5m2",
    "rowwise": "e4m3",
    "blockwise": "e4m3",
    "mxfp8": "e4m3",
    "nvfp4": "e2m1",
}
# Recipes that have one format for everything.
KEEP_LAST = {"nvfp4": 0.15}  # of equal blocks
ONE_FORMAT = {"mxfp8": "e4m3", "nvfp4": "e2m1"}
GLOBAL_SCALES = ("delayed", "exact")
# Fields that only delayed scaling and the training hooks read; mxfp8 has stats, too.
DELAYED_ONLY = ("amax_history_len", "margin", "amax_algorithm", "scale_update_interval", "warmup_steps", "stats")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the backend: ``torch.compile(model, backend="fp8", options={...})`` takes these fields.

    ``exclude`` and ``include`` are globs on dotted module names; naming a module names what is inside it, and
    a parameter's full name works too. Output heads (tied to an embedding, as wide as its vocabulary, or called
    ``lm_head`` and the like) are excluded unless a pattern of ``include`` other than ``"*"`` names them. A buffer, or
    an argument of a compiled function, is a weight only where a pattern of ``include`` names it by its own name.
    """

    recipe: str = "delayed"
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ("*",)
    keep_first: int | float | None = None  # of equal blocks, in high precision: a number or a fraction; None: by recipe
    keep_last: int | float | None = None
    forward_format: str | None = None  # None: e4m3, or the only one of the recipe
    backward_format: str | None = None  # None: by recipe, see BACKWARD_FORMATS
    backward: str = "quantized"  # gradients: by quantized gemms, by others, or by others of dequantized operands
    amax_history_len: int = 16
    margin: int = 0
    amax_algorithm: str = "max"
    scale_update_interval: int = 1
    quantize_inputs: bool = True
    quantize_weights: bool = True
    quantize_gradients: bool = True
    stochastic_rounding: bool | None = None  # of gradients; None: True with recipe="nvfp4", else False
    global_scale: str = "delayed"  # of recipe="nvfp4": from earlier steps, or "exact", of each tensor itself
    four_over_six: bool = False  # of recipe="nvfp4", in forward
    loss_scale: float | str | None = None
    warmup_steps: int = 0
    min_dim: int = 16
    target: str | Target | None = None
    stats: bool = False
    dump: str | None = None
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_choices()
        self._check_numbers()
        self._check_flags()
        self._check_contradictions()

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Config:
        """Return the config for the ``options`` of ``torch.compile``."""
        _check_known(options or {})
        return cls(**(options or {}))

    def replace(self, **changes: Any) -> Config:
        """Return a checked copy with some fields changed; the backward format follows the recipe unless it was set."""
        for name, value in self._by_recipe().items():
            if getattr(self, name) == value:
                changes.setdefault(name, None)
        return dataclasses.replace(self, **changes)

    @property
    def kept_blocks(self) -> tuple[float, float]:
        """How many of the first and of the last blocks stay in high precision: numbers, or fractions."""
        last = KEEP_LAST.get(self.recipe, 0) if self.keep_last is None else self.keep_last
        return self.keep_first or 0, last

    @property
    def keeps_state(self) -> bool:
        """True if a model remembers something of its tensors: scales from earlier steps, or what became of blocks."""
        return self.delays or self.stats

    @property
    def delays(self) -> bool:
        """True if scales come from earlier steps."""
        return self.recipe == "delayed" or (self.recipe == "nvfp4" and self.global_scale == "delayed")

    def fingerprint(self) -> str:
        """Return a text that is equal for equal configs; it is part of the key of Inductor's cache."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["inductor"] = sorted((name, repr(value)) for name, value in self.inductor.items())
        fields["target"] = str(self.target)  # a set in its repr would differ from process to process
        fields["dump"] = None  # where dumps go does not change the code
        return repr(sorted(fields.items(), key=lambda item: item[0]))

    def _normalise(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("exclude", "include"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            if not isinstance(value, (tuple, list)) or not all(isinstance(item, str) and item for item in value):
                raise ValueError(f"{name} expects glob patterns on module names such as ('lm_head',), got {value!r}")
            put(name, tuple(value))
        if self.dump is not None:
            if not isinstance(self.dump, (str, os.PathLike)):
                raise ValueError(f"dump expects a folder, got {self.dump!r}")
            put("dump", str(self.dump))
        if not isinstance(self.inductor, Mapping):
            raise ValueError(f"inductor expects a dict of Inductor config overrides, got {self.inductor!r}")
        _check_inductor(self.inductor)
        put("inductor", dict(self.inductor))
        if self.target is not None and not isinstance(self.target, Target):
            put("target", Target.parse(self.target))

    def _by_recipe(self) -> dict[str, Any]:
        """The fields that follow the recipe, and how gradients are computed, unless they are set."""
        quantized = self.backward == "quantized" and self.quantize_gradients is not False
        return {
            "forward_format": ONE_FORMAT.get(self.recipe, "e4m3"),
            "backward_format": BACKWARD_FORMATS[self.recipe],
            "stochastic_rounding": self.recipe == "nvfp4" and quantized,
        }

    def _check_choices(self) -> None:
        _check_choice("recipe", self.recipe, RECIPES)
        _check_choice("backward", self.backward, BACKWARD)
        for name, value in self._by_recipe().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        formats = (ONE_FORMAT[self.recipe],) if self.recipe in ONE_FORMAT else FORMATS
        _check_choice("forward_format", self.forward_format, formats)
        _check_choice("backward_format", self.backward_format, formats)
        _check_choice("global_scale", self.global_scale, GLOBAL_SCALES)
        _check_choice("amax_algorithm", self.amax_algorithm, AMAX_ALGORITHMS)
        scale = self.loss_scale
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < float("inf")
        if not (scale is None or scale == "dynamic" or number):
            raise ValueError(f"loss_scale expects None, 'dynamic' or a finite number above 0, got {scale!r}")

    def _check_numbers(self) -> None:
        for name, least, most in (
            ("amax_history_len", 1, None),
            ("scale_update_interval", 1, None),
            ("warmup_steps", 0, None),
            ("min_dim", 1, None),
            ("margin", -64, 64),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < least or (most is not None and value > most):
                bounds = f"of at least {least}" + (f" and at most {most}" if most is not None else "")
                raise ValueError(f"{name} expects a whole number {bounds}, got {value!r}")

        for name in ("keep_first", "keep_last"):
            value = getattr(self, name)
            number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            fraction = isinstance(value, float) and 0 <= value < 1
            if not (value is None or number or fraction):
                raise ValueError(
                    f"{name} expects a number of blocks such as 2, a fraction of them such as 0.15, or None, "
                    f"got {value!r}"
                )

    def _check_flags(self) -> None:
        for field in dataclasses.fields(self):
            if str(field.type).startswith("bool") and not isinstance(getattr(self, field.name), bool):
                raise ValueError(f"{field.name} expects True or False, got {getattr(self, field.name)!r}")

    def _check_contradictions(self) -> None:
        if not self.include:
            raise ValueError("include=() leaves nothing to rewrite; use the 'inductor' backend, or include=('*',)")
        both = sorted(set(self.include) & set(self.exclude))
        if both:
            raise ValueError(f"include and exclude both name {', '.join(map(repr, both))}; drop it from one of them")
        off = [name for name in ("inputs", "weights", "gradients") if not getattr(self, f"quantize_{name}")]
        if len(off) >= 2:
            fields = " and ".join(f"quantize_{name}=False" for name in off)
            raise ValueError(f"{fields} leave no matmul with two FP8 operands; switch at most one of them off")
        if self.backward != "quantized":
            self._check_backward()
        if self.stochastic_rounding and not self.quantize_gradients:
            raise ValueError("stochastic_rounding=True rounds gradients, but quantize_gradients=False keeps them whole")
        if not self.delays:
            changed = [name for name in DELAYED_ONLY if getattr(self, name) != _default(name)]
            if self.recipe in ("mxfp8", "nvfp4"):
                changed = [name for name in changed if name != "stats"]
            if changed:
                if self.recipe == "nvfp4":
                    raise ValueError(f"{', '.join(changed)} apply to global_scale='delayed' only, got 'exact'")
                raise ValueError(f"{', '.join(changed)} apply to recipe='delayed' only, got recipe={self.recipe!r}")
        if self.recipe != "nvfp4":
            changed = [name for name in ("global_scale", "four_over_six") if getattr(self, name) != _default(name)]
            if changed:
                raise ValueError(f"{', '.join(changed)} apply to recipe='nvfp4' only, got recipe={self.recipe!r}")
        if self.recipe == "mxfp8" and self.stochastic_rounding:
            raise ValueError("stochastic_rounding=True applies to other recipes: recipe='mxfp8' rounds to nearest even")

    def _check_backward(self) -> None:
        """No gradient is quantized, so options that say how contradict that."""
        option = f"backward={self.backward!r}"
        if self.backward_format != BACKWARD_FORMATS[self.recipe]:
            raise ValueError(
                f"backward_format={self.backward_format!r} is a format of gradients, but {option} quantizes none"
            )
        if self.stochastic_rounding:
            raise ValueError(f"stochastic_rounding=True rounds gradients, but {option} quantizes none")
        if not self.quantize_gradients:
            raise ValueError(f"quantize_gradients=False and {option} both say what backward reads; drop one of them")
        for name in ("inputs", "weights"):
            if not getattr(self, f"quantize_{name}"):
                raise ValueError(
                    f"quantize_{name}=False leaves forward in high precision, and {option} leaves backward there: "
                    "no matmul would run in FP8; drop one of them"
                )


def _checked_init(init: Any) -> Any:
    """Unknown fields are a ValueError that offers the nearest name; a dataclass would raise a TypeError."""

    @functools.wraps(init)
    def checked(self: Config, *args: Any, **kwargs: Any) -> None:
        _check_known(kwargs)
        init(self, *args, **kwargs)

    return checked


Config.__init__ = _checked_init(Config.__init__)  # type: ignore[method-assign]


def _check_known(options: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(Config)]
    unknown = [name for name in options if name not in known]
    if unknown:
        hints = [f"{name!r}{_nearest(str(name), known)}" for name in unknown]
        raise ValueError(f"unknown fp8 option {', '.join(hints)}; expected some of: {', '.join(known)}")


def _check_inductor(overrides: Mapping[str, Any]) -> None:
    for name, known in unknown_options(overrides).items():
        raise ValueError(f"inductor has no option {name!r}{_nearest(name, known)}; see torch._inductor.config")


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(Config) if field.name == name)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} is unknown{_nearest(str(value), choices)}; expected one of: {', '.join(choices)}"
        )


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
