"""LoRA over a packed base against LoRA over the same base in bf16: memory, time and gradients of a step, and losses.

    python benchmarks/lora_packed.py [--steps 200] [--width 1024]          # needs transformers and peft

The model is a small Llama over bytes, its text the standard library's source. Adapters stand on all linear layers.

memory      bytes of the base's linear layers while training, and what autograd keeps of them for backward
peak        peak memory of a process during a step (Linux), over what it had before the model, each base in a process of
            its own; uncompiled, or with --compiled after the code is there
step        forward and backward of the compiled model, medians of alternating runs: backend="fp8" on the packed base,
            with adapters in high precision, against Inductor on the bf16 base
gradients   the largest relative error of an adapter's, eager, over the packed and over the dequantized base
training    the base is trained in bf16 first; then adapters over it and over its packed form, on other windows
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fp8_compile
from fp8_compile import PackedLinear

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from byte_lm import BYTES, batches, stdlib_text  # noqa: E402

ADAPTERS_AS_THEY_ARE = {"exclude": ["*lora_*", "*lm_head"]}
FORMATS = ("nvfp4", "fp8")


def llama(width: int, layers: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    shape = dict(hidden_size=width, intermediate_size=11 * width // 4 // 16 * 16, num_hidden_layers=layers)
    heads = dict(num_attention_heads=width // 64, num_key_value_heads=width // 64)
    return LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, max_position_embeddings=512, **shape, **heads)).to(dtype)


def packed(model: nn.Module, format: str, method: str = "rtn") -> nn.Module:
    model = copy.deepcopy(model)
    fp8_compile.pack(model, format=format, method=method, progress=False)
    return model


def with_adapters(model: nn.Module, random: bool = False) -> nn.Module:
    torch.manual_seed(1)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=not random)
    return get_peft_model(model, config)


def windows(batch: int, length: int, seed: int) -> Iterator[Tensor]:
    for tokens, _ in batches(stdlib_text(), batch=batch, time=length, generator=torch.Generator().manual_seed(seed)):
        yield tokens


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def base_layers(model: nn.Module) -> list[nn.Module]:
    """The linear layers under adapters."""
    return [module for name, module in model.named_modules() if name.endswith(".base_layer")]


def base_bytes(model: nn.Module) -> int:
    """What the base's linear layers hold, whatever they are made of."""
    tensors = [tensor for layer in base_layers(model) for tensor in (*layer.parameters(), *layer.buffers())]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def saved_matrices(model: nn.Module, run: Any, tokens: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward and that have the shape of a base weight, in any dtype of
    two bytes or more and beside the model's own tensors: dequantized copies."""
    shapes = {(m.out_features, m.in_features) for m in base_layers(model)}
    shapes |= {shape[::-1] for shape in shapes}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if tuple(tensor.shape) in shapes and address not in own and tensor.is_floating_point():
            found[address] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(run, tokens)
    loss.backward()
    return sum(found.values())


def memory(options: argparse.Namespace) -> None:
    plain = llama(options.width, options.layers, torch.bfloat16)
    tokens = next(windows(1, 48, 0))
    print("| base | bytes of its layers | per weight | dequantized copies kept for backward |\n|---|---|---|---|")
    weights = 0
    for format in (None, *FORMATS):
        model = with_adapters(copy.deepcopy(plain) if format is None else packed(plain, format))
        layers, size = base_layers(model), base_bytes(model)
        weights = sum(m.in_features * m.out_features for m in layers)
        if format is not None:
            own = sum(m.memory_bytes() for m in layers if isinstance(m, PackedLinear))
            assert size <= own, (own, size)  # q/k/v and gate/up have one global scale between them
        saved = saved_matrices(model, model, tokens)
        print(f"| {format or 'bf16'} | {size / 1e6:.1f} MB | {8 * size / weights:.2f} bits | {saved / 1e6:.1f} MB |")


def peak(options: argparse.Namespace) -> None:
    print("\n| base | resident before a step | peak of a step | of bf16's |\n|---|---|---|---|", flush=True)
    first = 0.0
    for format in ("bf16", *FORMATS):
        arguments = ["--width", str(options.width), "--layers", str(options.layers), "--peak-of", format]
        arguments += ["--compiled"] if options.compiled else []
        arguments += ["--batch", str(options.batch), "--time", str(options.time)]
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
        before, most = map(float, done.stdout.split()[-2:])
        first = first or most
        print(f"| {format} | {before:.0f} MB | {most:.0f} MB | {most / first:.2f}x |", flush=True)


def peak_of(options: argparse.Namespace) -> None:
    """Print what is resident before a step and at its peak, in MB, over what the process had before the model."""
    tokens, start = next(windows(options.batch, options.time, 0)), resident("VmRSS")
    model = llama(options.width, options.layers, torch.bfloat16)
    if options.peak_of != "bf16":
        fp8_compile.pack(model, format=options.peak_of, method="rtn", progress=False)
    lora = with_adapters(model)
    fp8 = {} if options.peak_of == "bf16" else {"backend": "fp8", "options": ADAPTERS_AS_THEY_ARE}
    run = torch.compile(lora, **fp8) if options.compiled else lora
    loss_of(run, tokens).backward()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what packing and the compiler have left is given back
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    loss_of(run, tokens).backward()
    print(before - start, resident("VmHWM") - start)


def resident(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def step_time(options: argparse.Namespace) -> None:
    torch._dynamo.reset()
    plain, tokens = llama(options.width, options.layers, torch.bfloat16), next(windows(options.batch, options.time, 0))
    runs = {"bf16, Inductor": torch.compile(with_adapters(copy.deepcopy(plain)))}
    for format in FORMATS:
        model = with_adapters(packed(plain, format))
        runs[f"{format}, backend fp8"] = torch.compile(model, backend="fp8", options=ADAPTERS_AS_THEY_ARE)
    for run in runs.values():
        for _ in range(3):
            loss_of(run, tokens).backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    walls: dict[str, list[float]] = {name: [] for name in runs}
    cpus: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            loss_of(run, tokens).backward()
            walls[name].append(time.perf_counter() - wall)
            cpus[name].append(time.process_time() - cpu)
    if torch._dynamo.utils.counters["stats"]["unique_graphs"] != graphs:
        raise RuntimeError("something was compiled while it was timed: the times are not those of a step")
    print(f"\n{options.repeats} alternating steps of {options.batch} x {options.time} tokens, medians:\n")
    print("| base | ms per step | of bf16's | quartiles | CPU time, of bf16's |\n|---|---|---|---|---|")
    first = "bf16, Inductor"
    for name in runs:
        ratios = [one / other for one, other in zip(walls[name], walls[first])]
        by_cpu = [one / other for one, other in zip(cpus[name], cpus[first])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1e3 * statistics.median(walls[name])
        of_cpu = statistics.median(by_cpu)
        print(f"| {name} | {milliseconds:.0f} | {middle:.2f}x | {low:.2f} to {high:.2f} | {of_cpu:.2f}x |", flush=True)


def dequantized(model: nn.Module, plain: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            plain.get_submodule(name).weight.data = module.dequantize()
    return plain


def gradients(options: argparse.Namespace) -> None:
    """FP64 over the dequantized base is exact; FP32 has its own rounding, with either base."""
    tokens = next(windows(2, 64, 0))
    print("\n| base | packed, FP32 kernels, against FP64 | dequantized, FP32, against FP64 | one against the other |")
    print("|---|---|---|---|")
    for format in FORMATS:
        plain = llama(256, 2, torch.float32)
        base = packed(plain, format)
        found = []
        for model, dtype in (
            (dequantized(base, copy.deepcopy(plain)), torch.float64),
            (dequantized(base, copy.deepcopy(plain)), torch.float32),
            (base, torch.float32),
        ):
            model = with_adapters(model, random=True).to(dtype)
            loss_of(model, tokens).backward()
            found.append({name: p.grad.double() for name, p in model.named_parameters() if p.requires_grad})
        exact, noise, ours = found
        columns = [worst(ours, exact), worst(noise, exact), worst(ours, noise)]
        print(f"| {format} | {' | '.join(f'{one:.1e}' for one in columns)} |", flush=True)


def worst(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest relative distance of two gradients of the same name."""
    return max(float((some[name] - others[name]).norm() / others[name].norm()) for name in others)


def training(options: argparse.Namespace) -> None:
    model = llama(256, 4, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in itertools.islice(windows(8, 128, 2), 300):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"\n| base | loss, mean of the last 20 of {options.steps} steps | of bf16's |\n|---|---|---|")
    first = None
    for format in (None, *FORMATS):
        method = "sweep" if format == "nvfp4" else "rtn"
        base = copy.deepcopy(model) if format is None else packed(model, format, method)
        lora = with_adapters(base).train()
        for p in lora.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
        fp8 = {} if format is None else {"backend": "fp8", "options": ADAPTERS_AS_THEY_ARE}
        run = torch.compile(lora, **fp8)
        optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=1e-3)
        losses = []
        for tokens in itertools.islice(windows(8, 128, 3), options.steps):
            loss = loss_of(run, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        last = statistics.mean(losses[-20:])
        first = first or last
        print(f"| {format or 'bf16'} | {last:.4f} | {last / first:.4f} |")
        torch._dynamo.reset()


PARTS = {"memory": memory, "peak": peak, "step": step_time, "gradients": gradients, "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=1024, help="of the model that is timed (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of that model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--time", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=25, help="timed steps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to run (default: all)")
    parser.add_argument("--peak-of", choices=("bf16", *FORMATS), help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help="peak memory of compiled steps")
    options = parser.parse_args()
    if options.peak_of:
        peak_of(options)
        return
    for name, part in PARTS.items():
        if options.only is None or name in options.only:
            part(options)


if __name__ == "__main__":
    main()
