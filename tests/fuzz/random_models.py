"""Random small models, as Python source: what a failing case prints is what ran.

A model is a list of numbers. Each is the seed of one piece, which is written for the shape that the pieces before it
leave; so a list without some of its numbers is a model again, and a failing one can be made smaller.
"""

from __future__ import annotations

import random
from typing import Callable, Sequence

WIDTHS = (16, 32, 48, 64, 24, 40, 72, 17, 33, 75, 144, 130, 8, 1)
TOKENS = ((6,), (2, 5), (16,), (3, 16), (33,), (7,), (2, 9), (4, 8), (1,), (1, 1), (2, 3, 4), (130,), (0,), (2, 0))
MOST_ELEMENTS = 40_000
MOST_WIDTH = 300

PREAMBLE = '''\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    def __init__(self, width, hidden, act):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width), act

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Gated(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.both = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """On [B, T, D]; ``how``: which function multiplies queries by keys."""

    def __init__(self, width, heads, how):
        super().__init__()
        self.heads, self.how = heads, how
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        if self.how == "fused":
            y = F.scaled_dot_product_attention(q, k, v)
        elif self.how == "matmul":
            y = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
        else:
            y = torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)
        return self.out(y.transpose(1, 2).flatten(2))


class Lora(nn.Module):
    def __init__(self, width, out, rank):
        super().__init__()
        self.base = nn.Linear(width, out)
        self.base.weight.requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 2


'''

Piece = Callable[["Writer"], bool]
PIECES: list[Piece] = []


class Writer:
    """The lines of a model so far, and the shape of ``x`` after them."""

    def __init__(self, tokens: Sequence[int], width: int) -> None:
        self.rng = random.Random()
        self.shape = (*tokens, width)
        self.first_shape = self.shape
        self.init: list[str] = []
        self.forward: list[str] = []
        self.outputs: list[str] = []
        self.remembered: list[tuple[str, tuple[int, ...]]] = []
        self.layers: list[tuple[str, int, int]] = []  # (name, in, out) of the linear layers
        self.names: list[str] = []  # of modules and parameters, for patterns
        self.uses_other = False
        self._made = 0

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count

    def name(self, kind: str) -> str:
        self._made += 1
        return f"{kind}{self._made}"

    def layer(self, text: str) -> str:
        name = self.name("layer")
        self.init.append(f"self.{name} = {text}")
        self.names.append(name)
        return f"self.{name}"

    def param(self, *shape: int) -> str:
        name = self.name("w")
        scale = self.rng.choice((1, 1, 1, 0.01, 20)) * max(shape[-2] if len(shape) > 1 else 1, 1) ** -0.5
        self.init.append(f"self.{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale:.4g})")
        self.names.append(name)
        return f"self.{name}"

    def line(self, text: str, shape: Sequence[int] | None = None) -> bool:
        self.forward.append(text)
        if shape is not None:
            self.shape = tuple(shape)
        return True

    def new_width(self) -> int:
        return self.rng.choice(WIDTHS)

    def to(self, width: int) -> tuple[int, ...]:
        return (*self.shape[:-1], width)

    def flat(self) -> None:
        """Make x a matrix."""
        if len(self.shape) != 2:
            self.line(f"x = x.reshape({self.rows}, {self.width})", (self.rows, self.width))

    def stacked(self) -> bool:
        """Make x [B, T, D] with a small B, if that can be."""
        if len(self.shape) == 2:
            self.line("x = x.unsqueeze(0)", (1, *self.shape))
        return len(self.shape) == 3 and 1 <= self.shape[0] <= 4


def piece(share: int = 1) -> Callable[[Piece], Piece]:
    def register(function: Piece) -> Piece:
        PIECES.extend([function] * share)
        return function

    return register


def write_model(tokens: Sequence[int], width: int, seeds: Sequence[int]) -> Writer:
    writer = Writer(tokens, width)
    for seed in seeds:
        writer.rng = random.Random(seed)
        for _ in range(20):
            if writer.rng.choice(PIECES)(writer):
                break
        if max(writer.rows, 1) * writer.width > MOST_ELEMENTS or writer.width > MOST_WIDTH:
            out = writer.rng.choice((16, 32, 40))
            writer.line(f"x = {writer.layer(f'nn.Linear({writer.width}, {out})')}(x)", writer.to(out))
    if not any("nn." in line for line in writer.init):
        out = 32
        writer.line(f"x = {writer.layer(f'nn.Linear({writer.width}, {out})')}(x)", writer.to(out))
    return writer


def source(writer: Writer) -> str:
    lines = ["class Model(nn.Module):"]
    lines += ["    recomputes, low, casts = True, torch.bfloat16, True  # all off in the reference", ""]
    lines += ["    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in writer.init), ""]
    lines += ["    def run(self, function, x):"]
    lines += ["        return checkpoint(function, x, use_reentrant=False) if self.recomputes else function(x)", ""]
    lines += ["    def forward(self, x, other):", *(f"        {line}" for line in writer.forward)]
    lines += [f"        return {', '.join(['x', *writer.outputs])},", ""]
    return PREAMBLE + "\n".join(lines)


# ---- products -------------------------------------------------------------------------------------------------------


@piece(4)
def linear(w: Writer) -> bool:
    out = w.new_width()
    layer = w.layer(f"nn.Linear({w.width}, {out}, bias={w.rng.random() < 0.5})")
    w.layers.append((layer, w.width, out))
    return w.line(f"x = {layer}(x)", w.to(out))


@piece(2)
def functional_linear(w: Writer) -> bool:
    out = w.new_width()
    bias = f", {w.param(out)}" if w.rng.random() < 0.5 else ""
    return w.line(f"x = F.linear(x, {w.param(out, w.width)}{bias})", w.to(out))


@piece(2)
def product_with_a_parameter(w: Writer) -> bool:
    out = w.new_width()
    how = w.rng.choice(("x @ {}", "torch.matmul(x, {})", "torch.tensordot(x, {}, dims=1)", "torch.inner(x, {}.t())"))
    return w.line(f"x = {how.format(w.param(w.width, out))}", w.to(out))


@piece()
def product_with_a_transposed_parameter(w: Writer) -> bool:
    out = w.new_width()
    return w.line(f"x = x @ {w.param(out, w.width)}.{w.rng.choice(('t()', 'mT', 'transpose(0, 1)'))}", w.to(out))


@piece(2)
def weight_first(w: Writer) -> bool:
    if len(w.shape) > 3 or (len(w.shape) == 3 and w.shape[0] > 4):
        w.flat()
    out = w.new_width()
    back = ".transpose(-1, -2)" if w.rng.random() < 0.8 or len(w.shape) > 2 else ".t().contiguous()"
    return w.line(f"x = ({w.param(out, w.width)} @ x.transpose(-1, -2)){back}", w.to(out))


@piece(2)
def einsum(w: Writer) -> bool:
    out = w.new_width()
    how = w.rng.choice(("...d,df->...f", "...d,fd->...f"))
    shape = (w.width, out) if how == "...d,df->...f" else (out, w.width)
    return w.line(f'x = torch.einsum("{how}", x, {w.param(*shape)})', w.to(out))


@piece()
def einsum_of_heads(w: Writer) -> bool:
    heads, width = w.rng.choice((2, 3)), w.rng.choice((16, 24, 8))
    w.line(f'x = torch.einsum("...d,dhk->...hk", x, {w.param(w.width, heads, width)})', (*w.to(heads), width))
    if w.rng.random() < 0.5:
        out = w.new_width()
        return w.line(f'x = torch.einsum("...hk,hkd->...d", x, {w.param(heads, width, out)})', (*w.shape[:-2], out))
    return w.line("x = x.flatten(-2)", (*w.shape[:-2], heads * width))


@piece(2)
def stack_of_products(w: Writer) -> bool:
    if not w.stacked():
        return False
    batch, tokens, width = w.shape
    out = w.new_width()
    weight = w.param(batch, width, out)
    how = w.rng.choice(("torch.bmm(x, {})", "x @ {}", 'torch.einsum("etd,edf->etf", x, {})', "baddbmm"))
    if how == "baddbmm":
        added = w.param(*w.rng.choice(((batch, 1, out), (1, 1, out), (batch, tokens, out)))) if tokens else w.param(out)
        return w.line(f"x = torch.baddbmm({added}, x, {weight}, beta=0.5, alpha=2.0)", (batch, tokens, out))
    return w.line(f"x = {how.format(weight)}", (batch, tokens, out))


@piece(2)
def addmm(w: Writer) -> bool:
    w.flat()
    out = w.new_width()
    added = w.param(*w.rng.choice(((out,), (1, out), (max(w.rows, 1), out))))
    factors = w.rng.choice(("", ", beta=0.5, alpha=2.0", ", beta=0", ", alpha=-1.5", ", beta=3"))
    if factors == ", beta=0":  # Autograd wants a gradient for what is added, though it is zero.
        added += ".detach()"
    return w.line(f"x = torch.addmm({added}, x, {w.param(w.width, out)}{factors})", w.to(out))


@piece()
def vector(w: Writer) -> bool:
    if not w.rows:
        return False
    out = w.rng.choice((16, 32, 48))
    mean = "x.mean(0)" if len(w.shape) == 2 else f"x.reshape({w.rows}, {w.width}).mean(0)"
    weight = w.param(w.width, out)
    return w.line(f"x = ({mean} @ {weight}).expand({w.rows}, {out})", (w.rows, out))


@piece(2)
def used_again(w: Writer) -> bool:
    """A layer that was used before, its weight, or that transposed."""
    if not w.layers:
        return False
    layer, into, out = w.rng.choice(w.layers)
    if w.width == into:
        return w.line(w.rng.choice((f"x = {layer}(x)", f"x = F.linear(x, {layer}.weight)")), w.to(out))
    if w.width == out:
        return w.line(f"x = x @ {layer}.weight", w.to(into))
    return w.line(f"x = {layer}({w.layer(f'nn.Linear({w.width}, {into})')}(x))", w.to(out))


@piece(2)
def tied(w: Writer) -> bool:
    out = w.new_width()
    first, second = w.layer(f"nn.Linear({w.width}, {out})"), w.layer(f"nn.Linear({w.width}, {out}, bias=False)")
    w.init.append(f"{second}.weight = {first}.weight")
    return w.line(f"x = {first}(x) + torch.tanh({second}(x * 0.3))", w.to(out))


@piece(2)
def weight_made_of_parameters(w: Writer) -> bool:
    out, width = w.rng.choice((16, 32, 48, 40)), w.width
    how = w.rng.choice(("cat", "view", "masked", "slice", "sum", "product", "stack", "normalized", "index", "cast"))
    if how == "cat":
        weight = f"torch.cat([{w.param(out, width)}, {w.param(8, width)}])"
        out += 8
    elif how == "view":
        weight = f"{w.param(out * width)}.view({out}, {width})"
    elif how == "masked":
        name = w.name("mask")
        w.init.append(f'self.register_buffer("{name}", (torch.rand({out}, {width}) < 0.7).float())')
        weight = f"{w.param(out, width)} * self.{name}"
    elif how == "slice":
        weight = f"{w.param(out + 16, width + 16)}[8:{8 + out}, :{width}]"
    elif how == "sum":
        weight = f"{w.param(out, width)} + {w.param(out, 1)}"
    elif how == "product":
        weight = f"{w.param(out, width)} + {w.param(out, 4)} @ {w.param(4, width)}"
    elif how == "stack":
        weight = f"torch.stack([{w.param(out, width)}, {w.param(out, width)}]).sum(0)"
    elif how == "normalized":
        weight = f"F.normalize({w.param(out, width)}, dim=1)"
    elif how == "index":
        weight = f"{w.param(out + 4, width)}[torch.arange({out})]"
    else:
        weight = f"{w.param(out, width)}.to(self.low).to(x.dtype)"
    return w.line(f"x = F.linear(x, {weight})", w.to(out))


@piece()
def frozen(w: Writer) -> bool:
    out = w.new_width()
    layer = w.layer(f"nn.Linear({w.width}, {out})")
    w.init.append(f"{layer}.{w.rng.choice(('weight', 'bias'))}.requires_grad_(False)")
    return w.line(f"x = {layer}(x)", w.to(out))


@piece()
def product_with_a_buffer(w: Writer) -> bool:
    name, out = w.name("buffer"), w.rng.choice((16, 32))
    w.init.append(f'self.register_buffer("{name}", torch.randn({w.width}, {out}) * {max(w.width, 1) ** -0.5:.4g})')
    return w.line(f"x = x @ self.{name}", w.to(out))


@piece()
def activation_by_activation(w: Writer) -> bool:
    if len(w.shape) > 3 or w.shape[-2] > 64 or not w.rows:
        return False
    return w.line(f"x = x + (x @ x.transpose(-1, -2) * {1 / w.width:.4g}).softmax(-1) @ x")


@piece(2)
def mlp(w: Writer) -> bool:
    act = w.rng.choice(("F.gelu", "F.silu", "torch.tanh", "torch.relu", "F.relu6"))
    call = f"{w.layer(f'Mlp({w.width}, {w.new_width()}, {act})')}"
    return w.line(f"x = self.run({call}, x)" if w.rng.random() < 0.4 else f"x = {call}(x)")


@piece(2)
def gated(w: Writer) -> bool:
    call = f"{w.layer(f'Gated({w.width}, {w.rng.choice((16, 32, 48, 40, 17))})')}"
    return w.line(f"x = self.run({call}, x)" if w.rng.random() < 0.4 else f"x = {call}(x)")


@piece(2)
def attention(w: Writer) -> bool:
    heads = w.rng.choice((1, 2, 4))
    if w.width % heads or not w.rows or not w.stacked():
        return False
    how = w.rng.choice(("fused", "matmul", "einsum"))
    call = w.layer(f'Attention({w.width}, {heads}, "{how}")')
    return w.line(f"x = self.run({call}, x)" if w.rng.random() < 0.3 else f"x = {call}(x)")


@piece()
def lora(w: Writer) -> bool:
    out = w.new_width()
    return w.line(f"x = {w.layer(f'Lora({w.width}, {out}, {w.rng.choice((4, 16))})')}(x)", w.to(out))


@piece()
def library_attention(w: Writer) -> bool:
    if w.width % 2 or not w.rows or not w.stacked():
        return False
    layer = w.layer(f"nn.MultiheadAttention({w.width}, 2, batch_first=True)")
    return w.line(f"x = {layer}(x, x, x, need_weights={w.rng.random() < 0.5})[0]")


@piece(2)
def other_input(w: Writer) -> bool:
    """The second input, [4, 24], brought to the width of x."""
    w.uses_other = True
    return w.line(f"x = x + (other @ {w.param(24, w.width)}).sum(0)")


@piece()
def two_heads(w: Writer) -> bool:
    """One input of two layers, whose outputs meet again."""
    out = w.new_width()
    first, second = w.layer(f"nn.Linear({w.width}, {out})"), w.layer(f"nn.Linear({w.width}, {out}, bias=False)")
    how = w.rng.choice(("{0} * torch.sigmoid({1})", "{0} - {1}", "torch.maximum({0}, {1})"))
    return w.line(f"x = {how.format(f'{first}(x)', f'{second}(x)')}", w.to(out))
