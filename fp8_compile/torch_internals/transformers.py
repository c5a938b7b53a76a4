"""What is used of transformers beyond its documented interface: how it renames tensors when it saves and loads a model,
which implementation of its experts it uses, how ``generate`` makes its cache, and the names of a Trainer's files. It is
imported when it is needed."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Callable

from torch import Tensor, nn

TRIED = "5.23"  # a release that has all of this


@dataclasses.dataclass(frozen=True)
class Conversions:
    """What transformers does to the tensors of a model between memory and a checkpoint."""

    split: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # stacks of experts as they are saved
    stored: Callable[[str], str]  # the name that another tensor is saved under
    own: Callable[[str], str]  # the inverse of it


def conversions(root: nn.Module) -> Conversions | None:
    """The conversions of a model of transformers; None for a module that is not one."""
    if not hasattr(root, "base_model_prefix"):
        return None
    mapping_of = _named("conversion_mapping", "get_model_conversion_mapping")
    revert, rename = (_named("core_model_loading", name) for name in ("revert_weight_conversion", "apply_renamings"))
    renaming, prefix_change = (_named("core_model_loading", name) for name in ("WeightRenaming", "PrefixChange"))
    found = getattr(root, "_weight_conversions", None) or mapping_of(root, add_legacy=False)
    renamings = [one for one in found if isinstance(one, renaming) and not isinstance(one, prefix_change)]
    reverse = [one.reverse_transform() for one in renamings[::-1]]
    return Conversions(
        lambda tensors: revert(root, tensors), lambda name: rename(name, reverse), lambda name: rename(name, renamings)
    )


def experts_implementation(config: Any) -> str:
    """How a model's experts are multiplied: "eager", "grouped_mm" and so on."""
    return config._experts_implementation


def set_experts_implementation(config: Any, name: str) -> None:
    config._experts_implementation = name


def pass_over(model: Any, patterns: set[str]) -> None:
    """Let ``from_pretrained`` say nothing of a checkpoint's tensors that match and are not the model's."""
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}


def mark_initialized(module: Any) -> None:
    """Keep ``from_pretrained`` from filling a module's weights with random numbers."""
    module._is_hf_initialized = True


def use_all_conversions(model: Any) -> None:
    """Of a model's conversions ``from_pretrained`` keeps those that it used. Forget that, so that all of them count."""
    model._weight_conversions = None


def makes_caches(model: Any) -> bool:
    """True for a model that generates text, and makes a cache of keys and values for it."""
    return hasattr(model, "generate") and hasattr(model, "_prepare_cache_for_generation")


def change_caches(model: Any, change: Callable[[Any, Any], None]) -> None:
    """Call ``change(model, cache)`` with every cache that ``generate`` makes from now on, not with a user's own."""
    model._prepare_cache_for_generation = _PrepareCache(model, change)


@dataclasses.dataclass
class _PrepareCache:
    """In the place of a model's method. An object, so that it is copied and pickled with the model."""

    model: Any
    change: Callable[[Any, Any], None]

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = {id(value) for value in model_kwargs.values()}
        theirs: Any = type(self.model)
        made = theirs._prepare_cache_for_generation(self.model, generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if cache is not None and id(cache) not in own:
            self.change(self.model, getattr(cache, "self_attention_cache", cache))
        return made


def optimizer_file() -> str:
    """The file of a Trainer's checkpoint that has the optimizer's state."""
    return _named("trainer", "OPTIMIZER_NAME")


def _named(module: str, name: str) -> Any:
    """An object of transformers; an ImportError that says what to install where this release does not have it."""
    import transformers

    try:
        return getattr(importlib.import_module(f"transformers.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"transformers {transformers.__version__} has no {module}.{name}, which fp8_compile needs for checkpoints; "
            f"install a release that has it, such as {TRIED}"
        ) from error
