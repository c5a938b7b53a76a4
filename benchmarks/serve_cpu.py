"""Tokens per second and memory of a Llama of 1.1B parameters with random weights: ours, in NVFP4 with the output head
and the cache in FP8, against llama.cpp with the same NVFP4 weights, and with Q4_K.

    python benchmarks/serve_cpu.py --models FOLDER                          writes the models on the first run, 6 GB
    python benchmarks/serve_cpu.py --models FOLDER --threads 1 --clock cpu  on a machine that does other work too

Ours is transformers' model with a compiled ``forward`` and a static ``Fp8Cache``; inputs are rounded to int8, as
llama.cpp rounds them. llama.cpp is the wheel xllamacpp (``llama_cpp_peer.py``); its head is FP16 beside NVFP4 and Q6_K
beside Q4_K. Each is a process of its own, and they take turns. A figure of decoding is the difference between two
numbers of tokens, the least of several rounds, so that what happens once per request does not count. ``--clock cpu``
counts the time that a process was running, not the time that went by.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).parent
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
SIZES |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 8192}
OPTIONS = {"inductor": {"size_asserts": False, "alignment_asserts": False}}  # looked at by guards before
FEW, MANY = 4, 12  # tokens of the two requests whose difference counts


def write_models(folder: pathlib.Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fp8_compile

    sys.path.insert(0, str(HERE.parent / "tests" / "support"))
    from speaker import tokenizer

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    fp8_compile.pack(model.requires_grad_(False), method="rtn")
    blocks: Any = model.model.layers  # random weights: one block is packed, the others are copies
    for index in range(1, SIZES["num_hidden_layers"]):
        blocks.append(copy.deepcopy(blocks[0]))
        blocks[index].self_attn.layer_idx = index
    config.num_hidden_layers = len(blocks)
    fp8_compile.save_checkpoint(model, folder / "packed")
    fp8_compile.save_checkpoint(model, folder / "gguf", "gguf", tokenizer())
    files = str(folder / "gguf" / "model.gguf"), str(folder / "q4k.gguf")
    subprocess.run([sys.executable, str(HERE / "llama_cpp_peer.py"), "--requantize", *files], check=True)


class Ours:
    """What a user does: load, compile ``forward``, call it with a static cache."""

    def __init__(self, folder: pathlib.Path, threads: int, kv_cache: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        import fp8_compile
        from fp8_compile.packing.packed_linear import PackedLinear

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder / "packed", quantization_config=fp8_compile.PackConfig(), dtype="auto"
        ).eval()
        for layer in self.model.modules():
            if isinstance(layer, PackedLinear):
                layer.use_activations("int8")
        fp8_compile.pack(self.model, "fp8", include=("lm_head",), progress=False)
        self.kv_cache, self.caches = kv_cache, {}
        self.model.forward = torch.compile(self.model.forward, backend="fp8", options=OPTIONS)

    def cache(self, sequences: int, length: int) -> Any:
        import torch
        from transformers import StaticCache

        import fp8_compile

        key = sequences, length
        if key not in self.caches:
            made = fp8_compile.Fp8Cache(self.model, length) if self.kv_cache else StaticCache(self.model.config, length)
            made.early_initialization(sequences, SIZES["num_key_value_heads"], SIZES["head_dim"], torch.bfloat16, "cpu")
            self.caches = {key: made}
        return self.caches[key]

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        import torch

        cache = self.cache(asked["sequences"], asked["prompt"] + 64)
        if asked.get("cached"):  # the time does not depend on what is in the cache
            for layer in cache.layers:
                layer.cumulative_length.fill_(asked["prompt"])
        else:
            cache.reset()
            ids = torch.randint(10, 300, (asked["sequences"], asked["prompt"]))
            self.model(ids, past_key_values=cache, logits_to_keep=1)
        token = torch.full((asked["sequences"], 1), 20)
        for _ in range(asked["tokens"] - (not asked.get("cached"))):
            token = self.model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        return {}


def work(folder: pathlib.Path, threads: int, kv_cache: str | None) -> None:
    from llama_cpp_peer import memory, reply

    ours = Ours(folder, threads, kv_cache)
    reply({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        started, busy = time.perf_counter(), time.process_time()
        ours.answer(asked)
        reply({"wall": time.perf_counter() - started, "cpu": time.process_time() - busy, "memory": memory()})


class Engine:
    """A process that is asked."""

    def __init__(self, command: list[str], clock: str) -> None:
        self.clock, self.memory = clock, 0
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.read()

    def ask(self, **asked: Any) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        self.memory = max(self.memory, answer["memory"])
        return float(answer[self.clock])

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"a process ended with {self.process.wait()}: {self.process.args}")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def decode(engines: dict[str, Engine], sequences: int, context: int, rounds: int) -> dict[str, float]:
    """Tokens per second of all sequences together."""
    few: dict[str, list[float]] = {name: [] for name in engines}
    many: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(rounds + 1):
        for name, engine in engines.items():
            for tokens, found in ((FEW, few), (MANY, many)):
                took = engine.ask(prompt=context, tokens=tokens, sequences=sequences, cached=True)
                if round_:  # the first one compiles, and reads the prompt
                    found[name].append(took)
    return {name: sequences * (MANY - FEW) / (min(many[name]) - min(few[name])) for name in engines}


def first_token(engines: dict[str, Engine], prompt: int, rounds: int) -> dict[str, float]:
    """Prompt tokens per second until the first token is there."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(rounds + 1):
        for name, engine in engines.items():
            took = engine.ask(prompt=prompt, tokens=1, sequences=1, cached=False, seed=round_)
            if round_ or name != "ours":  # the first one compiles
                found[name].append(took)
    return {name: prompt / min(times) for name, times in found.items()}


def show(title: str, found: dict[str, float]) -> None:
    cells = "".join(f"{name:>18} {speed:8.2f}" for name, speed in found.items())
    ratios = ", ".join(f"{found['ours'] / speed:.2f}x of {name}" for name, speed in found.items() if name != "ours")
    print(f"{title:36}{cells}   ours: {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", type=pathlib.Path, required=True, help="a folder for the models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 4096])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache", choices=("fp8", "exact"), default="fp8")
    parser.add_argument("--engines", nargs="*", default=["llama.cpp NVFP4", "llama.cpp Q4_K"])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen.models, chosen.threads, chosen.kv_cache if chosen.kv_cache == "fp8" else None)
        return
    if not (chosen.models / "q4k.gguf").exists():
        write_models(chosen.models)
    files = {"llama.cpp NVFP4": "gguf/model.gguf", "llama.cpp Q4_K": "q4k.gguf"}
    common = ["--threads", str(chosen.threads)]
    own = [str(HERE / "serve_cpu.py"), "--models", str(chosen.models), "--worker", *common]
    own += ["--kv-cache", chosen.kv_cache]

    def started(sequences: int, context: int) -> dict[str, Engine]:
        sizes = ["--sequences", str(sequences), "--context", str(context), *common]
        peers = {
            name: Engine([str(HERE / "llama_cpp_peer.py"), str(chosen.models / files[name]), *sizes], chosen.clock)
            for name in chosen.engines
        }
        return {"ours": Engine(own, chosen.clock), **peers}

    for prompt in chosen.prompts:
        engines = started(1, prompt)
        show(f"prefill of {prompt}, tokens/s", first_token(engines, prompt, 1))
        for engine in engines.values():
            engine.end()
    for context in chosen.contexts:
        for sequences in chosen.sequences:
            engines = started(sequences, context)
            show(f"decode {sequences} at {context}, tokens/s", decode(engines, sequences, context, chosen.rounds))
            print(" " * 36 + ", ".join(f"{name} {one.memory / 1e6:.0f} MB" for name, one in engines.items()))
            for engine in engines.values():
                engine.end()


if __name__ == "__main__":
    main()
