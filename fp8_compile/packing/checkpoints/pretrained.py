"""Packed layers in transformers: ``from_pretrained`` gives them, and ``save_pretrained`` writes them.

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=fp8_compile.PackConfig())

Of a packed folder, ours or another tool's, it loads the packed layers as they are. Other weights are packed while they
are loaded: a layer, with those that servers fuse with it, is in memory in full only until it is packed. Both use what
transformers offers for quantizers of other packages.
"""

from __future__ import annotations

import pathlib
from typing import Any, Sequence

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8_compile.packing.choose import choose_weights
from fp8_compile.packing.formats import Settings
from fp8_compile.packing.linear_layers import ON_META, fused_groups, parameter_of
from fp8_compile.packing.pack import settings_of
from fp8_compile.packing.packed_experts import LazyStack
from fp8_compile.packing.packed_linear import PackedLinear
from fp8_compile.packing.packer import Packer
from fp8_compile.packing.use_fp8_cache import KINDS as CACHES
from fp8_compile.packing.use_fp8_cache import use_fp8_cache
from fp8_compile.torch_internals.transformers import (
    is_initialized,
    mark_initialized,
    pass_over,
    save_as_given,
    saves_adapters,
    use_all_conversions,
)

from .cache_scales import OF_CACHE, say_unused, wanted_cache
from .files import open_tensors
from .mxfp4 import PARTS as MXFP4_PARTS
from .packed_layers import packed_layers
from .safetensors_writer import DTYPES
from .save_and_load import place_packed, stored_as
from .stored_names import StoredNames

METHOD = "fp8_compile"
TORCH = {name: dtype for dtype, name in DTYPES.items()}


@register_quantization_config(METHOD)
class PackConfig(QuantizationConfigMixin):
    """What ``from_pretrained`` is to pack, and how: the arguments of ``fp8_compile.pack``. Of a folder that is packed
    already only ``activations`` and ``kv_cache`` count, which are ``load_checkpoint``'s. ``layout`` is how
    ``save_pretrained`` stores it."""

    def __init__(
        self,
        format: str = "nvfp4",
        method: str | None = None,
        exclude: Sequence[str] = (),
        activations: str | None = None,
        include: Sequence[str] = ("*",),
        layout: str = "compressed-tensors",
        kv_cache: str | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # theirs is a list of their own methods
        self.format, self.method, self.activations = format, method, activations
        self.exclude, self.include, self.layout = tuple(exclude), tuple(include), layout
        if kv_cache not in CACHES:
            raise ValueError(f"kv_cache={kv_cache!r} is unknown; expected one of: {', '.join(map(repr, CACHES))}")
        self.kv_cache = kv_cache
        self.stored: dict[str, Any] | None = None  # what the folder's config.json says, once the model is saved
        settings_of(format, method, activations, False, 16, {})

    def to_dict(self) -> dict[str, Any]:
        names = ("quant_method", "format", "method", "activations", "exclude", "include", "layout", "kv_cache")
        return self.stored or {name: getattr(self, name) for name in names}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


@register_quantizer(METHOD)
class PackQuantizer(HfQuantizer):
    """Puts packed layers into a model that ``from_pretrained`` is loading."""

    quantization_config: PackConfig

    def __init__(self, quantization_config: PackConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.files: list[pathlib.Path] = []
        self.packed: list[str] = []  # tensors of the checkpoint that are parts of packed weights
        self.cache: list[str] = []  # scales of an FP8 key-value cache
        self.removed: dict[str, nn.Parameter] = {}  # parameters on the meta device that packed weights stand for
        self.groups: dict[str, tuple[str, ...]] = {}  # weights that are packed while loading, by name, with their group
        self.waiting: dict[str, Tensor] = {}  # weights that are there, but not all of their group
        self.taken: set[str] = set()  # weights that have been there
        self.missing: set[str] = set()  # transformers' own set of what the checkpoint lacks

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> None:
        with torch.device("cpu"):  # transformers makes everything on the meta device here
            self.files = [pathlib.Path(file) for file in checkpoint_files or () if str(file).endswith(".safetensors")]
            described = _described(self.files)
            self._find_packed(model, described)
            self.pre_quantized = bool(self.packed)
            if not self.pre_quantized:
                self._choose(model)

    def _find_packed(self, model: Any, described: dict[str, Tensor]) -> None:
        """Take the parameters that the checkpoint has packed out of the model, so that transformers looks for none."""
        names, found = StoredNames(model), packed_layers(described)
        used = {tensor for layer, stored in found.items() for tensor in stored.tensor_names(layer)}
        mixtures = {f"{stack}_{part}": stack for stack in names.stacks for part in MXFP4_PARTS}
        self.packed = [name for name in described if name in used or name in mixtures]
        self.cache = cache = [name for name in described if name.rpartition(".")[2] in OF_CACHE]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        packed = {mixtures[name] for name in self.packed if name in mixtures}
        packed |= {names.parts[layer].stack for layer in found if layer in names.parts}
        packed |= {f"{layer}.weight" for layer in names.found_in([one for one in found if one not in names.parts])}
        for own in packed & parameters.keys():
            self.removed[own] = parameters[own]
            module, last = _home(model, own)
            del module._parameters[last]
            # Modules initialize what they have, and what their children have: they find it, and leave it alone.
            mark_initialized(parameters[own])
            vars(module)[last] = parameters[own]
        if self.packed:
            passed = {rf"^{name.replace('.', '[.]')}$" for name in (*self.packed, *cache)}
            passed |= {rf"^{names.renamed(name).replace('.', '[.]')}$" for name in (*self.packed, *cache)}
            passed |= {rf"^{own.replace('.', '[.]')}" for own in self.removed}  # a merge of experts names the stack
            pass_over(model, passed)

    def _choose(self, model: Any) -> None:
        config = self.quantization_config
        layers, stacks, skipped = choose_weights(model, config.include, config.exclude)
        tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
        chosen = [*layers, *(row.name for row in skipped if row.reason == ON_META)]
        chosen = [name for name in chosen if f"{name}.weight" not in tied]
        grouped = {name: group for group in fused_groups(chosen) for name in group}
        for name in chosen:
            group = grouped.get(name, (name,))
            self.groups[f"{name}.weight"] = tuple(f"{one}.weight" for one in group)
        self.groups |= {name: (name,) for name in stacks}
        if not self.groups:
            raise ValueError("PackConfig: nothing to pack; expected a model with linear layers or experts, see exclude")

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return param_name in self.groups

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def take(self, model: Any, name: str, value: Tensor) -> None:
        """Keep a weight until all of its group are there, then pack them."""
        self.waiting[name] = value
        self.taken.add(name)
        group = self.groups[name]
        if all(one in self.waiting for one in group):
            self._pack(model, group)

    def _pack(self, model: Any, group: Sequence[str]) -> None:
        layers, stacks = {}, {}
        for name in group:
            module, own = _home(model, name)
            module._parameters[own] = nn.Parameter(self.waiting.pop(name), requires_grad=False)
            if own == "weight":
                layers[name.removesuffix(".weight")] = module
            else:
                stacks[name] = next(one for key, one in choose_weights(model, (name,), ())[1].items() if key == name)
        Packer(model, layers, stacks, self.settings).pack_all(None, False)

    def _take_the_rest(self, model: Any) -> None:
        """Take weights that were put into the model: the checkpoint has them in one matrix with others, the first of
        which is not to be packed."""
        for name in self.groups.keys() - self.taken:
            module, own = _home(model, name)
            parameter = module._parameters.get(own)
            if parameter is not None and is_initialized(parameter):
                self.take(model, name, parameter.detach())

    def _initialize_biases(self, model: Any) -> None:
        """Set the biases of packed layers that the checkpoint lacks to zero, as transformers does with those of linear
        layers. It warns of them."""
        for name in self.taken:
            module, _ = _home(model, name)
            if isinstance(module, PackedLinear) and f"{name.removesuffix('weight')}bias" in self.missing:
                nn.init.zeros_(parameter_of(module, "bias"))

    @property
    def settings(self) -> Settings:
        config = self.quantization_config
        return settings_of(config.format, config.method, config.activations, False, 16, {})

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self._take_the_rest(model)
        for group in {self.groups[name]: None for name in list(self.waiting)}:
            self._pack(model, [name for name in group if name in self.waiting])
        self._initialize_biases(model)
        if self.removed:
            use_all_conversions(model)  # none was used for packed weights
            for name, parameter in self.removed.items():
                module, own = _home(model, name)
                vars(module).pop(own, None)
                module._parameters[own] = parameter
            tensors, where = _read(self.files, set(self.packed))
            folder = self.files[0].parent
            place_packed(model, tensors, where, folder, self.quantization_config.activations, _device(model))
            self.removed.clear()
        kv_cache = self.quantization_config.kv_cache
        if kv_cache is not None:
            scales, _ = _read(self.files, set(self.cache))
            cache = wanted_cache(kv_cache, model, scales, self.files[0].parent)
            use_fp8_cache(model, cache)
        elif self.cache:
            say_unused(self.cache)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """The tensors as ``save_checkpoint`` stores them; the configuration is what says so. None for a model with
        adapters, of which transformers saves those alone, by their names in the model."""
        if saves_adapters(model):
            return None, {}
        stored = stored_as(model, self.quantization_config.layout)
        self.quantization_config.stored = stored.config
        model.config.quantization_config = self.quantization_config
        return stored.tensors, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters on top are

    @property
    def is_compileable(self) -> bool:
        return True


class _Pack(ConversionOps):
    """Packs a weight where transformers would have put it into the model."""

    def __init__(self, quantizer: PackQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        plain: dict[str, Any] = {}  # not to be packed, but stored in one matrix with a weight that is
        for name, value in input_dict.items():
            if name not in self.quantizer.groups:
                plain[name] = value
                continue
            self.quantizer.take(kwargs["model"], name, value[0] if isinstance(value, list) else value)
            if kwargs.get("missing_keys") is not None:
                self.quantizer.missing = kwargs["missing_keys"]
                self.quantizer.missing.discard(name)
        return plain


def let_it_save(root: nn.Module) -> None:
    """Give a model that was packed in place what ``save_pretrained`` asks for the tensors to write."""
    if getattr(root, "hf_quantizer", None) is None:
        root.hf_quantizer = PackQuantizer(PackConfig(), pre_quantized=True)  # type: ignore[assignment]


def _home(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module, _, own = name.rpartition(".")
    return model.get_submodule(module), own


def _device(model: nn.Module) -> torch.device:
    return next(one.device for one in model.parameters() if one.device.type != "meta")


def _described(files: Sequence[pathlib.Path]) -> dict[str, Tensor]:
    """The tensors of some files, on the meta device."""
    described: dict[str, Tensor] = {}
    for file in files:
        with open_tensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                one = opened.get_slice(name)
                described[name] = torch.empty(one.get_shape(), dtype=TORCH.get(one.get_dtype()), device="meta")
    return described


def _read(files: Sequence[pathlib.Path], names: set[str]) -> tuple[dict[str, Tensor], dict[str, pathlib.Path]]:
    tensors, where = {}, {}
    for file in files:
        with open_tensors(file) as opened:
            for name in names.intersection(opened.keys()):
                tensors[name], where[name] = opened.get_tensor(name), file
    return tensors, where


def _merge(own: Any, given: Any) -> Any:
    """transformers' merge of a folder's configuration with the user's, which takes no quantizer in the place of the
    folder's; a ``PackConfig`` says which layers shall read the folder."""
    return given if isinstance(given, PackConfig) else _merge_theirs(own, given)


mark_initialized(LazyStack)  # a class's mark is that of all its tensors
save_as_given(lambda model: isinstance(getattr(model, "hf_quantizer", None), PackQuantizer))
_merge_theirs = AutoHfQuantizer.merge_quantization_configs
AutoHfQuantizer.merge_quantization_configs = staticmethod(_merge)  # type: ignore[method-assign, assignment]
