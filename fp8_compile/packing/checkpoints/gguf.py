"""GGUF as llama.cpp reads it: NVFP4 is tensor type 40, a superblock of 64 weights in 36 bytes.

    4 block scales (E4M3, unsigned), then for each block of 16: 8 bytes, weights 0-7 in the low nibbles, 8-15 in the
    high ones; the global scale of ``X.weight`` is the tensor ``X.scale``, F32 [1]

Names are llama.cpp's where the ``gguf`` package knows the architecture, and the model's own otherwise. Rows of q and k
of Llama and Mistral are put in the order of llama.cpp's rotary embedding. The tokenizer is not the model's, so the file
says that it has none: llama.cpp then takes and gives numbers of tokens. Its converter writes one (``--vocab-only``).
"""

from __future__ import annotations

import pathlib
import warnings
from typing import Any, Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fp8_compile.kernels.nvfp4 import e2m1
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.packing.packed_weight import Matrix
from fp8_compile.whole_files import written_beside

SUPERBLOCK = 64
ROTATED = ("llama", "mistral")  # whose q and k llama.cpp permutes
ARCHITECTURES = {"mistral": "llama"}
TRIED = ("llama", "qwen3")  # whose logits from llama.cpp (ggml 0.25) were compared with ours


def superblocks(codes: Tensor, block_scales: Tensor) -> Tensor:
    """Standard codes [N, K/2] and block scales [N, K/16] -> uint8 [N, K/64 * 36]."""
    rows = codes.shape[0]
    halves = e2m1.unpack(codes).view(rows, -1, 4, 2, 8)
    nibbles = (halves[..., 0, :] | (halves[..., 1, :] << 4)).reshape(rows, -1, 32)
    scales = block_scales.view(torch.uint8).view(rows, -1, 4)
    return torch.cat([scales, nibbles], -1).reshape(rows, -1)


def write_gguf(
    root: nn.Module,
    path: pathlib.Path,
    packed: Mapping[str, Matrix],
    others: Mapping[str, Tensor],
) -> None:
    """Write the packed weights and the other tensors of a model to one file."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError("layout='gguf' needs the gguf package: pip install gguf") from None
    weights = {name: one for name, one in packed.items() if isinstance(one, NVFP4Weight)}
    odd = [name for name in packed if name not in weights or weights[name].columns % SUPERBLOCK]
    if odd:
        raise ValueError(f"{', '.join(odd)}: GGUF holds NVFP4 with K a multiple of 64; exclude the layer from packing")
    settings = _settings(root)
    architecture = ARCHITECTURES.get(settings.get("model_type", ""), settings.get("model_type", "fp8_compile"))
    renamed = _names(gguf, architecture, settings)
    _look_at_rotary(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path) as part:
        writer = gguf.GGUFWriter(part, architecture)
        _add_settings(writer, settings)
        writer.add_tokenizer_model("no_vocab")  # or llama.cpp loads nothing
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
    """The model's configuration, by the names that most models of transformers have: a GPT-2 maps its own to them."""
    config = getattr(root, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    settings = config.to_dict()
    settings.update({name: getattr(config, name) for name in config.attribute_map})
    if settings["model_type"] == "gpt2":
        settings["intermediate_size"] = settings["n_inner"] or 4 * settings["hidden_size"]
    return settings


def _names(gguf: Any, architecture: str, settings: Mapping[str, Any]) -> Callable[[str], str]:
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        return lambda name: name
    if architecture not in TRIED:
        # qwen2's and gpt2's feed-forward layers, for instance: their code passes no scales on.
        warnings.warn(
            f"GGUF of a {architecture} model: llama.cpp was tried with {', '.join(TRIED)} and mistral. Of other models "
            "it may ignore the global scales of some layers and compute nonsense: compare its output first",
            stacklevel=4,
        )
    table = gguf.get_tensor_name_map(known[architecture], settings.get("num_hidden_layers", 0))

    def renamed(name: str) -> str:
        return table.get_name(name, try_suffixes=(".weight", ".bias")) or name

    return renamed


def _look_at_rotary(settings: Mapping[str, Any]) -> None:
    """Warn of a rotary embedding that the file can't describe: it holds theta only."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        warnings.warn(
            f"GGUF: the model scales its rotary embedding (rope_type {kind!r}, as Llama 3.1 and later do), which is "
            "not written: llama.cpp will compute other positions. Its converter writes such models",
            stacklevel=4,
        )


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
        ("vocab_size", writer.add_vocab_size),
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("layer_norm_epsilon", writer.add_layer_norm_eps),
        ("rope_theta", writer.add_rope_freq_base),
    ):
        value = settings.get(name)
        if name == "rope_theta" and value is None:
            value = (settings.get("rope_parameters") or {}).get("rope_theta")
        if value is not None:
            add(value)
