"""Bytes saved for backward: FP8 against the same bf16 model, both compiled by Inductor's partitioner.

Nothing is computed: the step runs on fake tensors, and what autograd keeps between forward and backward is
counted. Parameters are not, since they are there anyway. FP8 copies of weights, which forward makes for a GPU's
backward, are counted apart: they grow with the model and not with the batch.

    python benchmarks/saved_bytes.py [--budget 0.9] [--tensors]

``--tensors``: also each tensor of at least 0.1 MB. ``--budget``: torch's
``torch._functorch.config.activation_memory_budget``, the share of these bytes that the partitioner may keep. It then
runs gemms again in backward, and no number changes.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, Sequence

import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses import FakeTensorMode

from fp8_compile import Config
from fp8_compile.backend.graph import compile_graph
from fp8_compile.backend.interpret import NO_CACHE, run_uncompiled
from fp8_compile.config import RECIPES
from fp8_compile.target import Target

TOKENS, WIDTH, HIDDEN = 4096, 2048, 8192


class SwiGLU(nn.Module):
    """RMSNorm, SwiGLU, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class GELU(nn.Module):
    """LayerNorm, GELU MLP with biases, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ReLU(nn.Module):
    """ReLU MLP, no norm: only the matmuls' inputs are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.relu(self.up(x)))


def saved_bytes(block: type[nn.Module], config: Config | None) -> tuple[int, int, list[str]]:
    """What one training forward of the block in bf16 keeps for its backward: of activations, of weights; and the
    larger tensors of it, largest first.

    ``config`` None: plain Inductor.
    """
    torch._dynamo.reset()
    found: list[tuple[int, int, list[str]]] = []

    def inner_compile(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        if kwargs.get("is_backward"):
            kept = [node for node in gm.graph.find_nodes(op="placeholder") if _is_saved(node)]
            weights = [node for node in kept if not _has_tokens(node)]
            large = sorted((node for node in kept if _bytes([node]) >= 1e5), key=lambda node: -_bytes([node]))
            tensors = [_described(node) for node in large]
            found.append((_bytes(kept) - _bytes(weights), _bytes(weights), tensors))
        return run_uncompiled(gm, inputs)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if config is None:
            return compile_fx(gm, list(inputs), inner_compile=inner_compile, config_patches=NO_CACHE)
        return compile_graph(gm, inputs, config.replace(inductor=NO_CACHE), inner_compile=inner_compile)[0]

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        torch.set_default_dtype(torch.bfloat16)
        try:
            torch.compile(block(), backend=backend)(x).sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
    return found[0]


def _is_saved(node: fx.Node) -> bool:
    """Whether an input of the backward graph is neither a gradient nor a parameter."""
    is_parameter = node.name.startswith("primals") and node.meta["val"].shape[0] != TOKENS
    return not (node.name.startswith("tangents") or is_parameter)


def _has_tokens(node: fx.Node) -> bool:
    """Whether a dimension is that of the tokens. Scales are too small to matter."""
    *rows, columns = node.meta["val"].shape
    each = 2 if node.meta["val"].dtype is torch.uint8 else 1  # codes of NVFP4 are two to a byte
    return TOKENS in (*rows, each * columns)


def _described(node: fx.Node) -> str:
    kept = node.meta["val"]
    dtype = str(kept.dtype).removeprefix("torch.")
    of = "activations" if _has_tokens(node) else "weights, scales"
    return f"{_bytes([node]) / 1e6:8.1f} MB  {dtype} {list(kept.shape)} of {of}"


def _bytes(nodes: Sequence[fx.Node]) -> int:
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1.0, help="torch's activation_memory_budget, for FP8 alone")
    parser.add_argument("--tensors", action="store_true")
    arguments = parser.parse_args()
    budget = arguments.budget
    print(f"bytes saved for backward, {TOKENS} tokens, d={WIDTH}, h={HIDDEN}, bf16 model; x: ratio to bf16")
    for block in (SwiGLU, GELU, ReLU):
        *sizes, tensors = saved_bytes(block, None)
        base = sum(sizes)
        print(f"{block.__name__:8} {'inductor bf16':24} {base / 1e6:8.1f} MB  1.00x")
        _print_tensors(tensors if arguments.tensors else [])
        for target in ("cpu", "cuda:90", "cuda:100"):
            for recipe in (one for one in RECIPES if one in Target.parse(target).recipes):
                with functorch_config.patch(activation_memory_budget=budget):
                    size, weights, tensors = saved_bytes(block, Config(recipe=recipe, target=target))
                copies = f"  and {weights / 1e6:.1f} MB of weights" if weights > 1e6 else ""
                name = f"fp8 {recipe} {target}"
                print(f"{block.__name__:8} {name:24} {size / 1e6:8.1f} MB  {size / base:.2f}x{copies}")
                _print_tensors(tensors if arguments.tensors else [])


def _print_tensors(tensors: Sequence[str]) -> None:
    for tensor in tensors:
        print(f"{'':10}{tensor}")


if __name__ == "__main__":
    main()
