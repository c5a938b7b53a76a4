"""Caches in FP8 in models of transformers: eager, compiled and exported, of every kind of layer."""

from __future__ import annotations

import copy
import pathlib
import pickle
from typing import Any

import pytest
import torch
from mixtures import mixtral, qwen
from safetensors.torch import load_file, save_file
from speaker import TEXT, speaker, spoken, tokenizer
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Fp8Cache, pack
from fp8_compile.packing.use_fp8_cache import use_fp8_cache

PARTS = ("keys", "values", "cumulative_length")  # of a static layer
WINDOW = {"kind": "mistral", "sliding_window": 8}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return speaker()


def logits(model: nn.Module, cache: Any, ids: Tensor) -> Tensor:
    """A prompt of 12 tokens, then one token at a time."""
    found = [model(ids[:, :12], past_key_values=cache).logits]
    found += [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(12, ids.shape[1])]
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "qwen3"}, WINDOW, {"kind": "gpt2", "n_embd": 64}],
    ids=["llama", "qwen3", "sliding", "gpt2"],
)
@pytest.mark.parametrize("length", [None, 24])
def test_logits_are_near_those_of_an_exact_cache(options: dict[str, Any], length: int | None) -> None:
    model = speaker(steps=0, **options)
    ids = torch.randint(0, 320, (2, 20))
    exact = logits(model, StaticCache(model.config, length) if length else DynamicCache(config=model.config), ids)
    cache = Fp8Cache(model, length)
    found = logits(model, cache, ids)
    assert all(layer.keys.dtype == torch.uint8 for layer in cache.layers)
    # Each vector is off by 2**-4 of a number at the most, some 3 % of its length.
    assert (found - exact).norm() < 0.03 * exact.norm() and not torch.equal(found, exact)


def test_a_cache_is_copied_repeated_reordered_and_cut_as_transformers_does(model: nn.Module) -> None:
    ids = torch.randint(0, 320, (2, 12))
    cache = Fp8Cache(model)
    model(ids, past_key_values=cache)
    for same in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(same.layers[1].keys, cache.layers[1].keys)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-4)
    other = Fp8Cache(model)
    model(ids[[1, 0], :8], past_key_values=other)
    assert cache.get_seq_length() == 8
    torch.testing.assert_close(cache.layers[0].keys, other.layers[0].keys)
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    found = model.generate(ids, past_key_values=Fp8Cache(model), **beams)
    assert found.shape == (2, 18)


def test_a_packed_model_generates_with_fp8_caches_and_half_the_bytes() -> None:
    model = speaker()
    pack(model, method="rtn", kv_cache="fp8", progress=False)
    prompt = tokenizer()(TEXT[:9], return_tensors="pt")["input_ids"]
    for one in (model, copy.deepcopy(model)):
        assert TEXT[:9] + spoken(one, TEXT[:9]) == TEXT
        for kind in (None, "static"):
            asked = {"max_new_tokens": 4, "return_dict_in_generate": True, "cache_implementation": kind}
            cache = one.generate(prompt, attention_mask=torch.ones_like(prompt), **asked).past_key_values
            assert {type(layer).__name__ for layer in cache.layers} <= {"Fp8DynamicLayer", "Fp8StaticLayer"}
            assert cache.layers[0].keys.nbytes == cache.layers[0].keys[..., 0].numel() * (16 + 4)
    given = DynamicCache(config=model.config)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=given, max_new_tokens=2)
    assert given.layers[0].keys.dtype == torch.float32  # a user's own cache stays what it is


def test_static_scales_come_from_batches_or_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    model = speaker()
    ids = tokenizer()(TEXT, return_tensors="pt")["input_ids"]
    calibration = fp8_compile.calibrate(model, [{"input_ids": ids}], progress=False)
    pack(model, method="rtn", calibration=calibration, kv_cache="fp8_static", progress=False)
    assert TEXT[:9] + spoken(model, TEXT[:9]) == TEXT
    cache = Fp8Cache(model)
    model(ids, past_key_values=cache)
    largest = cache.layers[0].keys.view(torch.float8_e4m3fn).float().abs().amax((0, 2, 3))
    assert torch.equal(largest, torch.full((2,), 448.0)) and cache.layers[0].keys.shape[-1] == 16

    fp8_compile.save_checkpoint(model, tmp_path)
    file = tmp_path / "model.safetensors"
    names = [f"model.layers.{index}.self_attn.{side}_scale" for index in range(2) for side in "kv"]
    scales = {name: torch.tensor([0.02]) for name in names}
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    loaded = fp8_compile.load_checkpoint(speaker(steps=0), tmp_path, kv_cache="fp8_static")
    assert torch.equal(Fp8Cache(loaded).layers[1].value_scales, torch.tensor([0.02, 0.02]))
    assert TEXT[:9] + spoken(loaded, TEXT[:9]) == TEXT
    from transformers import AutoModelForCausalLM

    config = fp8_compile.PackConfig(kv_cache="fp8_static")
    auto = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    assert torch.equal(Fp8Cache(auto).layers[0].key_scales, torch.tensor([0.02, 0.02]))
    save_file({**load_file(file), next(iter(scales)): torch.tensor([-1.0])}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_scale: expected a positive number"):
        fp8_compile.load_checkpoint(speaker(steps=0), tmp_path, kv_cache="fp8_static")


def test_compiled_code_reads_the_bytes_and_gives_what_eager_mode_gives(caplog: pytest.LogCaptureFixture) -> None:
    model = speaker(steps=0, num_hidden_layers=1)
    pack(model, method="rtn", progress=False)
    ids = torch.randint(0, 320, (2, 15))
    eager = logits(model, Fp8Cache(model, 24), ids)
    model.forward = torch.compile(model.forward, backend="fp8")
    with caplog.at_level("DEBUG", "fp8_compile.passes"):
        found = logits(model, Fp8Cache(model, 24), ids)
    torch.testing.assert_close(found, eager, rtol=1e-3, atol=1e-3)  # sums in another order, through one layer
    assert "ReadFp8Cache: 1 attentions over caches in FP8" in caplog.text


@pytest.mark.parametrize("make", [qwen, mixtral])
def test_mixtures_of_experts_have_such_a_cache_eager_and_compiled(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = make().requires_grad_(False)
    ids = torch.randint(1, 60, (2, 15))
    exact = logits(model, DynamicCache(config=model.config), ids)
    pack(model, method="rtn", kv_cache="fp8", progress=False)
    asked = {"max_new_tokens": 4, "return_dict_in_generate": True, "cache_implementation": "static"}
    assert {type(one).__name__ for one in model.generate(ids, **asked).past_key_values.layers} == {"Fp8StaticLayer"}
    eager = logits(model, Fp8Cache(model, 24), ids)
    assert (eager - exact).norm() < 0.2 * exact.norm()  # what 4 bits cost
    model.forward = torch.compile(model.forward, backend=UncompiledBackend())
    with caplog.at_level("DEBUG", "fp8_compile.passes"):
        found = logits(model, Fp8Cache(model, 24), ids)
    torch.testing.assert_close(found, eager, rtol=1e-3, atol=1e-3)
    assert "ReadFp8Cache: 1 attentions over caches in FP8" in caplog.text


def test_an_exported_package_has_the_cache_inside_and_counts_its_tokens(tmp_path: pathlib.Path) -> None:
    model = speaker(steps=0, num_hidden_layers=1)
    step = Step(model, 24)
    ids = torch.randint(0, 320, (1, 5))
    wanted = [step(ids[:, at : at + 1]) for at in range(5)]
    path = tmp_path / "step.pt2"
    fp8_compile.export(Step(model, 24), (ids[:, :1],), path, weights=None)
    package = fp8_compile.load(path)
    for at in range(5):
        torch.testing.assert_close(package(ids[:, at : at + 1].contiguous()), wanted[at], rtol=1e-3, atol=1e-3)


class Step(nn.Module):
    """One token in, its logits out; the cache, and how far it is filled, are the module's buffers."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.model, self.cache = model, Fp8Cache(model, length)
        self.cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
        for index, layer in enumerate(self.cache.layers):
            for name in PARTS:
                self.register_buffer(f"{name}_{index}", getattr(layer, name), persistent=False)
        self.eval()

    def forward(self, token: Tensor) -> Tensor:
        for index, layer in enumerate(self.cache.layers):
            for name in PARTS:
                setattr(layer, name, getattr(self, f"{name}_{index}"))
        position = self.cumulative_length_0.view(1, 1).clone()
        return self.model(token, position_ids=position, past_key_values=self.cache).logits


def test_what_can_not_have_such_a_cache_says_so(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="kv_cache='fp4' is unknown; expected one of: None, 'fp8', 'fp8_static'"):
        pack(model, kv_cache="fp4")
    with pytest.raises(ValueError, match="kv_cache='fp8' is for models of transformers.*got Sequential"):
        pack(nn.Sequential(nn.Linear(16, 16)), kv_cache="fp8")
    with pytest.raises(ValueError, match="kv_cache='fp8_static' takes its scales from the calibration's batches"):
        pack(model, kv_cache="fp8_static")
    with pytest.raises(TypeError, match="expected a model of transformers or its config, got Linear"):
        Fp8Cache(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_cache_len expects at least 1 token, got 0"):
        Fp8Cache(model, 0)
    use_fp8_cache(copy.deepcopy(model))
