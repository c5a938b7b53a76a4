"""LoRA over a packed base in Hugging Face's Trainer, TRL's SFTTrainer and accelerate: losses fall, checkpoints resume.

The base is never changed, so every test compares it before and after, byte by byte.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8_compile

peft = pytest.importorskip("peft", reason="LoRA layers are peft's")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

import fp8_compile.hugging_face  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
EXCLUDE = ["*lora_*", "*lm_head"]
TEXT = b"the base is packed and stays so, the adapters are trained. " * 8


def lora(dequantized: bool = False) -> nn.Module:
    """Adapters over a packed base, or over plain layers with the same weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    fp8_compile.pack(model, method="rtn", progress=False)
    if dequantized:
        for name, module in model.named_modules():
            if isinstance(module, fp8_compile.PackedLinear):
                plain.get_submodule(name).weight.data = module.dequantize()
        model = plain
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def windows() -> list[dict[str, Tensor]]:
    tokens = torch.tensor(list(TEXT))
    return [{"input_ids": tokens[at : at + 32], "labels": tokens[at : at + 32]} for at in range(0, 320, 10)]


def base_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if "lora_" in name}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def arguments(folder: Path, kind: Any = None, **options: Any) -> Any:
    given = {
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return (kind or transformers.TrainingArguments)(output_dir=str(folder), **(given | options))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a plain Trainer over the dequantized base."""
    options = arguments(tmp_path_factory.mktemp("plain"), save_strategy="no")
    trainer = transformers.Trainer(lora(dequantized=True), options, train_dataset=windows())
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.2
    return losses(trainer)


# Six steps of Adam, whose first ones go by the sign of a gradient: FP32 sums in another order move little.
CLOSE = 2e-3


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_trainer_trains_adapters_and_resumes_bit_for_bit(
    tmp_path: Path, checkpointing: bool, expected: list[float]
) -> None:
    found = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        model = lora()
        model.enable_input_require_grads()
        before = base_of(model)
        options = arguments(tmp_path, gradient_checkpointing=checkpointing)
        trainer = transformers.Trainer(model, options, train_dataset=windows())
        trainer.train(resume_from_checkpoint=resume)
        assert same(base_of(model), before)
        found.append(adapters_of(model))
        assert losses(trainer) == pytest.approx(expected, rel=CLOSE)
    assert same(*found)
    files = {file.name for file in (tmp_path / "checkpoint-3").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


def test_the_compiled_trainer_learns_as_the_plain_one(tmp_path: Path, expected: list[float]) -> None:
    """A real model of transformers in FP8, compiled whole: some 10 seconds."""
    model = lora()
    model.compile(backend="fp8", options={"exclude": EXCLUDE})
    trainer = transformers.Trainer(model, arguments(tmp_path, save_strategy="no"), train_dataset=windows())
    trainer.train()
    assert losses(trainer) == pytest.approx(expected, rel=CLOSE)


def test_sft_trains_adapters_over_a_packed_base(tmp_path: Path, expected: list[float]) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="trl's data are datasets")
    model = lora()
    before = base_of(model)
    data = datasets.Dataset.from_list([{"input_ids": one["input_ids"].tolist()} for one in windows()])
    options = arguments(tmp_path, trl.SFTConfig, save_strategy="no", dataset_kwargs={"skip_prepare_dataset": True})
    tokenizer = byte_tokenizer()
    trainer = trl.SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert losses(trainer) == pytest.approx(expected, rel=CLOSE)
    assert same(base_of(model), before)


def byte_tokenizer() -> Any:
    """One token per ASCII character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token=chr(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=chr(0), eos_token=chr(1))


def test_accelerate_compiles_and_trains_adapters_in_bf16_autocast() -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="fp8")
    model = lora()
    before = base_of(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.stack([one["input_ids"] for one in windows()[:8]])
    found = []
    for _ in range(8):
        loss = run(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    assert all(after < before for before, after in zip(found, found[1:]))
    assert same(base_of(model), before)
