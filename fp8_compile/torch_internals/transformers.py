"""What is used of transformers beyond its documented interface: how it renames tensors when it saves and loads a model,
which implementation of its experts it uses, how ``generate`` makes its cache, and the names of a Trainer's files. It is
imported when it is needed."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any, Callable, Collection, Mapping

from torch import Tensor, nn

TRIED = "5.23"  # a release that has all of this


@dataclasses.dataclass(frozen=True)
class Conversions:
    """What transformers does to the tensors of a model between memory and a checkpoint: some are renamed, some are
    stored as several or together with others. Tensors are converted all at once, because some names depend on others.
    """

    root: Any
    every: list[Any]  # from a checkpoint to memory

    def store(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors, or some of them, as they are saved."""
        revert = _named("core_model_loading", "revert_weight_conversion")
        return revert(_Converted(self.root, self.every), dict(tensors))

    def load(self, tensors: Mapping[str, Tensor], known: Collection[str]) -> dict[str, Tensor]:
        """A checkpoint's tensors as the model has them, whose names are ``known``; others keep their names. It does
        what ``convert_and_load_state_dict_in_model`` does, but puts nothing into the model."""
        sort_key, renaming = (_named("core_model_loading", name) for name in ("dot_natural_key", "WeightRenaming"))
        own_names = dict.fromkeys(known, True)
        renamings, converters = self._loading()
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        groups: dict[str, Any] = {}
        for name in sorted(tensors, key=sort_key):
            own, pattern = self._renamed(name, renamings, converters, own_names)
            made = copy.deepcopy(by_pattern[pattern]) if pattern is not None else renaming(name, own)
            groups.setdefault(own, made).add_tensor(own, name, name if pattern is None else pattern, tensors[name])
        found: dict[str, Tensor] = {}
        for own, one in groups.items():
            converted = one.convert(own, model=_Converted(self.root, self.every), config=self.root.config)
            found |= {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
        return found

    def _loading(self) -> tuple[list[Any], list[Any]]:
        """Renamings and converters, from a checkpoint to memory; also those for the oldest checkpoints."""
        converter, renaming = (_named("core_model_loading", name) for name in ("WeightConverter", "WeightRenaming"))
        legacy = _named("conversion_mapping", "get_checkpoint_conversion_mapping")("legacy") or []
        every = [*copy.deepcopy(self.every), *legacy]
        return [one for one in every if isinstance(one, renaming)], [one for one in every if isinstance(one, converter)]

    def _renamed(
        self, name: str, renamings: list[Any], converters: list[Any], known: Mapping[str, Any]
    ) -> tuple[str, str | None]:
        rename, prefix = _named("core_model_loading", "rename_source_key"), self.root.base_model_prefix
        own, pattern = rename(name, renamings, converters, prefix, known)
        if own in known:
            return own, pattern
        return rename(name, [], [], prefix, known)  # stored by the model's own name, or not a tensor of it

    def stored(self, name: str) -> str:
        """The name that a tensor is saved under which is renamed, and nothing else."""
        rename, renaming = (_named("core_model_loading", one) for one in ("apply_renamings", "WeightRenaming"))
        return rename(name, [one.reverse_transform() for one in self.every[::-1] if isinstance(one, renaming)])

    def own(self, name: str, known: Collection[str] | None = None) -> str:
        """The inverse of it. ``known`` are the names of the model's tensors, if it is to be one of them."""
        renamings, _ = self._loading()
        if known is None:
            return _named("core_model_loading", "apply_renamings")(name, renamings)
        return self._renamed(name, renamings, [], dict.fromkeys(known, True))[0]

class _Converted:
    """A model for conversions: with others than those that it was loaded by, and with packed weights, whose shape some
    of them ask for, among its parameters."""

    def __init__(self, root: nn.Module, every: list[Any]) -> None:
        self.root, self._weight_conversions = root, every

    def get_parameter(self, name: str) -> Any:
        module, _, own = name.rpartition(".")
        return getattr(self.root.get_submodule(module), own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.root, name)


def conversions(root: nn.Module, of_its_checkpoint: bool = True) -> Conversions | None:
    """The conversions of a model of transformers; None for a module that is not one. They are those by which it was
    loaded, or all that transformers knows for it where it was not, or with ``of_its_checkpoint=False``."""
    if not hasattr(root, "base_model_prefix"):
        return None
    used = getattr(root, "_weight_conversions", None) if of_its_checkpoint else None
    if used is None:
        mapping_of = _named("conversion_mapping", "get_model_conversion_mapping")
        prefix_change = _named("core_model_loading", "PrefixChange")
        # Prefixes that some checkpoints have and others lack are not known without the checkpoint.
        used = [one for one in mapping_of(root, add_legacy=False) if not isinstance(one, prefix_change)]
    return Conversions(root, used)


def experts_implementation(config: Any) -> str:
    """How a model's experts are multiplied: "eager", "grouped_mm" and so on."""
    return config._experts_implementation


def set_experts_implementation(config: Any, name: str) -> None:
    config._experts_implementation = name


def pass_over(model: Any, patterns: set[str]) -> None:
    """Let ``from_pretrained`` say nothing of a checkpoint's tensors that match and are not the model's."""
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}


def mark_initialized(tensor: Any) -> None:
    """Keep ``from_pretrained`` from filling a tensor with random numbers, whichever module does it: a model's
    ``_init_weights`` writes to the weights of children, too."""
    tensor._is_hf_initialized = True


def is_initialized(tensor: Any) -> bool:
    """True for a tensor that ``from_pretrained`` has loaded."""
    return getattr(tensor, "_is_hf_initialized", False)


def saves_adapters(model: Any) -> bool:
    """True for a model that has taken adapters by ``add_adapter`` or ``load_adapter``."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def save_as_given(is_stored: Callable[[Any], bool]) -> None:
    """Let ``save_pretrained`` write the tensors of some models as their quantizer gives them: by the names of a
    checkpoint, which transformers would rename once more, as if they were those of the model."""
    import transformers.modeling_utils

    theirs = _named("modeling_utils", "revert_weight_conversion")

    def revert(model: Any, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return state_dict if is_stored(model) else theirs(model, state_dict)

    transformers.modeling_utils.revert_weight_conversion = revert


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
