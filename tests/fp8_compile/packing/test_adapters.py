"""LoRA on packed models and packed models under LoRA: gradients, memory, what is packed, merging."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config
from fp8_compile.packing.packed_experts import PackedStack
from fp8_compile.packing.packed_linear import PackedLinear

peft = pytest.importorskip("peft", reason="LoRA layers are peft's")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

SIZES = dict(vocab_size=96, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


def llama(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**sizes, intermediate_size=96, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(config)


def mixture(layers: int = 2, implementation: str = "grouped_mm") -> nn.Module:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers}
    config = transformers.Qwen3MoeConfig(
        **sizes, intermediate_size=96, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, head_dim=16
    )
    config._experts_implementation = implementation
    return transformers.Qwen3MoeForCausalLM(config)


def dequantized(packed: nn.Module, plain: nn.Module) -> nn.Module:
    """The plain model with the weights that the packed one stands for."""
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear):
            plain.get_submodule(name).weight.data = module.dequantize()
        elif isinstance(module, PackedStack):
            parent, _, own = name.removesuffix("_packed").rpartition(".")
            getattr(plain.get_submodule(parent), own).data = module.dequantize()
    return plain


def with_adapters(model: nn.Module, **options: object) -> nn.Module:
    """On all linear layers; peft adapts experts by their parameters, which packed ones have not: attention alone."""
    torch.manual_seed(1)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"] if hasattr(model.config, "num_experts") else "all-linear"
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def in_fp64(model: nn.Module) -> nn.Module:
    for module in model.modules():  # grouped products of FP64 are not there
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model.double()


def gradients(model: nn.Module, run: nn.Module | None = None) -> dict[str, torch.Tensor]:
    tokens = torch.arange(64).view(2, 32) % 90
    (model if run is None else run)(input_ids=tokens, labels=tokens).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def check_same(packed: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """Each gradient is as near that of an FP64 model as the dequantized base's is in FP32, within a factor of 3, as
    both are sums of the same numbers in different orders."""
    assert packed.keys() == plain.keys() == exact.keys() and packed
    noise = max(error(plain[name], exact[name]) for name in exact)
    for name in exact:
        assert error(packed[name], exact[name]) < max(1e-6, 3 * noise), name
    assert noise < 1e-5


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
@pytest.mark.parametrize("make", [llama, mixture])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_every_adapter_are_those_over_the_dequantized_base(make, format, compiled) -> None:
    layers = 1 if compiled else 2  # the code of a second layer takes as long again, and is the same
    packed = make(layers)
    fp8_compile.pack(packed, format=format, method="rtn", progress=False)
    plain, exact = (with_adapters(dequantized(packed, make(layers))) for _ in range(2))
    model = with_adapters(packed)
    # The graphs are interpreted: what is compared is which numbers they multiply. The trainers' test compiles them.
    backend = UncompiledBackend(Config(exclude=("*lora_*", "*lm_head")))
    run = torch.compile(model, backend=backend) if compiled else None
    got = gradients(model, run)
    assert len(got) >= layers * 2 * 4
    check_same(got, gradients(plain), gradients(in_fp64(exact)))
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [llama, mixture])
def test_gradients_in_fp64_are_those_over_the_dequantized_base(make) -> None:
    packed = make()
    fp8_compile.pack(packed, method="rtn", progress=False)
    exact = in_fp64(with_adapters(dequantized(packed, make())))
    got, expected = gradients(in_fp64(with_adapters(packed))), gradients(exact)
    assert max(error(got[name], expected[name]) for name in expected) < 1e-6


def test_packing_after_adapters_leaves_them_alone_and_groups_q_k_v_by_their_base() -> None:
    model = with_adapters(llama())
    before = {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}
    report = fp8_compile.pack(model, method="rtn", progress=False)
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == 14 and all(name.endswith(".base_layer") for name in packed)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert any("belongs to an adapter" in row.reason for row in report.rows)
    attention = model.get_submodule("base_model.model.model.layers.0.self_attn")
    scales = [getattr(attention, name).base_layer.global_scale for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])
    other = llama()
    fp8_compile.pack(other, method="rtn", progress=False)
    one, two = gradients(model), gradients(with_adapters(other))
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"use_rslora": True}], ids=["dora", "rslora"])
def test_variants_of_lora_work_as_on_the_dequantized_base(options) -> None:
    packed = llama()
    fp8_compile.pack(packed, method="rtn", progress=False)
    plain, exact = (with_adapters(dequantized(packed, llama()), **options) for _ in range(2))
    check_same(gradients(with_adapters(packed, **options)), gradients(plain), gradients(in_fp64(exact)))


def test_merging_by_peft_is_refused_and_ours_packs_again() -> None:
    packed = llama()
    fp8_compile.pack(packed, method="rtn", progress=False)
    model = with_adapters(packed)
    with pytest.raises(ValueError, match="fp8_compile.merge_adapters"):
        model.merge_adapter()
    tokens = torch.arange(32)[None]
    wanted = model(input_ids=tokens).logits
    assert len(fp8_compile.merge_adapters(model)) == 14
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    assert layer.merged
    got = model(input_ids=tokens).logits
    assert (got - wanted).norm() < 0.3 * wanted.norm()  # one more rounding to four bits, of random weights
    unloaded = model.unload()
    assert not any("lora_" in name for name, _ in unloaded.named_modules())
    assert torch.equal(unloaded(input_ids=tokens).logits, got)


def test_merging_some_of_q_k_v_leaves_the_others_as_they_are() -> None:
    packed = llama()
    fp8_compile.pack(packed, method="rtn", progress=False)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    key = packed.get_submodule("model.layers.0.self_attn.k_proj")
    before = key.dequantize()
    fp8_compile.merge_adapters(peft.get_peft_model(packed, config))
    assert torch.equal(key.dequantize(), before)


def test_uncompiled_backward_keeps_no_dequantized_weight() -> None:
    layer = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    fp8_compile.pack(layer, method="rtn", progress=False, include=("*",))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(torch.randn(8, 64, requires_grad=True))
    assert sum(t.nbytes for t in saved) <= sum(module.memory_bytes() for module in layer)
    y.sum().backward()


def test_a_second_gradient_goes_through_packed_layers() -> None:
    layer = nn.Linear(32, 48)
    weight = copy.deepcopy(layer)
    model = nn.Sequential(layer)
    fp8_compile.pack(model, method="rtn", progress=False, include=("*",))
    weight.weight.data = model[0].dequantize()
    results = []
    for one in (model, weight):
        x = torch.linspace(-1, 1, 64).view(2, 32).requires_grad_()
        (first,) = torch.autograd.grad(one(x).pow(3).sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


# A process for each order, both forked from one that has imported what the two libraries stand on and neither of them.
IN_BOTH_ORDERS = """
import importlib, os, sys
import torch, transformers
for order in (("peft", "fp8_compile"), ("fp8_compile", "peft")):
    assert not {"peft", "fp8_compile"} & sys.modules.keys()
    if not (child := os.fork()):
        for name in order:
            importlib.import_module(name)
        from peft.tuners.lora.model import LoraModel
        print(*order, LoraModel._create_new_module.knows_packed_layers, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_packed_layers_are_known_whichever_library_is_imported_second() -> None:
    done = subprocess.run([sys.executable, "-c", IN_BOTH_ORDERS], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["peft fp8_compile True", "fp8_compile peft True"], done.stderr


def test_initializations_that_change_the_base_weight_are_refused() -> None:
    packed = llama()
    fp8_compile.pack(packed, method="rtn", progress=False)
    with pytest.raises(ValueError, match="changes the base weight"):
        peft.get_peft_model(packed, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="pissa"))
