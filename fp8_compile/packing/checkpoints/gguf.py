"""GGUF as llama.cpp reads it: NVFP4 is tensor type 40, a superblock of 64 weights in 36 bytes.

    4 block scales (E4M3, unsigned), then for each block of 16: 8 bytes, weights 0-7 in the low nibbles, 8-15 in the
    high ones; the global scale of ``X.weight`` is the tensor ``X.scale``, F32 [1]

It is written for the architectures in ``ARCHITECTURES``, complete: with the vocabulary, scaled rotary embeddings, and a
tied head once. Other models, and experts, are for llama.cpp's own converter, which reads the folders that
``save_checkpoint`` writes. Rows of q and k of Llama and Mistral are put in the order of llama.cpp's rotary embedding.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fp8_compile.kernels.nvfp4 import e2m1
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.packing.packed_weight import Matrix
from fp8_compile.whole_files import written_beside

from .gguf_vocabulary import CONVERTER, add_vocabulary, check_vocabulary

SUPERBLOCK = 64
ROTATED = ("llama", "mistral")  # whose q and k llama.cpp permutes
# Model types and llama.cpp's names for them: those whose logits from llama.cpp were compared with ours. Of others it
# may ignore the global scales of some layers (qwen2's and gpt2's feed-forward layers, for instance).
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}


def superblocks(codes: Tensor, block_scales: Tensor) -> Tensor:
    """Standard codes [N, K/2] and block scales [N, K/16] -> uint8 [N, K/64 * 36]."""
    rows = codes.shape[0]
    halves = e2m1.unpack(codes).view(rows, -1, 4, 2, 8)
    nibbles = (halves[..., 0, :] | (halves[..., 1, :] << 4)).reshape(rows, -1, 32)
    scales = block_scales.view(torch.uint8).view(rows, -1, 4)
    return torch.cat([scales, nibbles], -1).reshape(rows, -1)


def write_gguf(
    root: nn.Module, path: pathlib.Path, packed: Mapping[str, Matrix], others: Mapping[str, Tensor], tokenizer: Any
) -> None:
    """Write the packed weights, the other tensors of a model and its vocabulary to one file."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError("layout='gguf' needs the gguf package: pip install gguf") from None
    weights = {name: one for name, one in packed.items() if isinstance(one, NVFP4Weight)}
    odd = [name for name in packed if name not in weights or weights[name].columns % SUPERBLOCK]
    if odd:
        raise ValueError(f"{', '.join(odd)}: GGUF holds NVFP4 with K a multiple of 64; exclude the layer from packing")
    settings = _settings(root)
    kind = settings.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{type(root).__name__}: layout='gguf' is written for model types {', '.join(ARCHITECTURES)}, got {kind}; "
            f"{CONVERTER}"
        )
    rotary = rotary_scaling(gguf, root, settings)
    check_vocabulary(tokenizer)
    renamed = _names(gguf, ARCHITECTURES[kind], settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path) as part:
        writer = gguf.GGUFWriter(part, ARCHITECTURES[kind])
        _add_settings(writer, settings)
        rotary.write(writer)
        add_vocabulary(gguf, writer, tokenizer, settings["vocab_size"])
        for name, tensor in others.items():
            wide = tensor.dim() > 1 and tensor.dtype in (torch.bfloat16, torch.float16)
            kept = tensor.detach().cpu().to(torch.float16 if wide else torch.float32)
            if tensor.dim():  # q and k that were not packed, and their biases
                kept = kept[_row_order(name.rpartition(".")[0], len(kept), settings)]
            writer.add_tensor(renamed(name), kept.numpy())
        for name, weight in weights.items():
            order = _row_order(name, weight.shape[0], settings)
            data = superblocks(
                weight.codes.cpu()[order], weight.block_scales.view(torch.uint8).cpu()[order].view(torch.float8_e4m3fn)
            )
            new = renamed(f"{name}.weight")
            writer.add_tensor(new, data.numpy(), raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            scale = np.array([weight.global_scale.item()], dtype=np.float32)
            writer.add_tensor(f"{new.removesuffix('.weight')}.scale", scale)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_NVFP4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _settings(root: nn.Module) -> dict[str, Any]:
    config = getattr(root, "config", None)
    return config.to_dict() if config is not None and hasattr(config, "to_dict") else {}


def _names(gguf: Any, architecture: str, settings: Mapping[str, Any]) -> Callable[[str], str]:
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(known[architecture], settings["num_hidden_layers"])

    def renamed(name: str) -> str:
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"{name}: llama.cpp's {architecture} has no such tensor; {CONVERTER}")
        return found

    return renamed


@dataclasses.dataclass
class RotaryScaling:
    """How positions are scaled: llama.cpp's kind and numbers, or a factor for each frequency."""

    kind: Any = None
    factor: float = 1.0
    original_length: int | None = None
    factors: Tensor | None = None

    def write(self, writer: Any) -> None:
        if self.kind is not None:
            writer.add_rope_scaling_type(self.kind)
            writer.add_rope_scaling_factor(self.factor)
        if self.original_length is not None:
            writer.add_rope_scaling_orig_ctx_len(self.original_length)
        if self.factors is not None:
            writer.add_tensor("rope_freqs.weight", self.factors.numpy())


def rotary_scaling(gguf: Any, root: nn.Module, settings: Mapping[str, Any]) -> RotaryScaling:
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RotaryScaling()
    if kind == "linear":
        return RotaryScaling(gguf.RopeScalingType.LINEAR, float(rope["factor"]))
    own = {"beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None, "attention_factor": None}
    if kind == "yarn" and all(rope.get(name) in (None, value) for name, value in own.items()):
        return RotaryScaling(
            gguf.RopeScalingType.YARN, float(rope["factor"]), rope.get("original_max_position_embeddings")
        )
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](root.config, "cpu")
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(len(scaled), dtype=torch.float32) / len(scaled))
        return RotaryScaling(factors=plain / scaled.to(torch.float32))
    raise ValueError(f"{type(root).__name__}: layout='gguf' can't describe this rope_type {kind!r}; {CONVERTER}")


def _row_order(name: str, rows: int, settings: Mapping[str, Any]) -> Tensor:
    """The order of rows that puts the rotary halves of a head beside each other, as llama.cpp's Llama wants them."""
    own = name.rpartition(".")[2]
    heads = settings.get("num_attention_heads" if own == "q_proj" else "num_key_value_heads")
    order = torch.arange(rows)
    if own not in ("q_proj", "k_proj") or settings.get("model_type") not in ROTATED or not heads:
        return order
    return order.view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def _add_settings(writer: Any, settings: Mapping[str, Any]) -> None:
    for name, add in (
        ("num_hidden_layers", writer.add_block_count),
        ("max_position_embeddings", writer.add_context_length),
        ("hidden_size", writer.add_embedding_length),
        ("intermediate_size", writer.add_feed_forward_length),
        ("num_attention_heads", writer.add_head_count),
        ("num_key_value_heads", writer.add_head_count_kv),
        ("head_dim", writer.add_key_length),
        ("head_dim", writer.add_value_length),
        ("head_dim", writer.add_rope_dimension_count),
        ("vocab_size", writer.add_vocab_size),
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("rope_theta", writer.add_rope_freq_base),
    ):
        value = settings.get(name)
        if name == "rope_theta" and value is None:
            value = (settings.get("rope_parameters") or {}).get("rope_theta")
        if value is not None:
            add(value)
