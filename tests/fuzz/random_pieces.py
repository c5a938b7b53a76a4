"""Pieces of random models that multiply nothing: views, pointwise functions, further outputs, graph breaks."""

from __future__ import annotations

from random_models import Writer, piece


@piece(3)
def pointwise(w: Writer) -> bool:
    functions = ("F.gelu(x)", "F.silu(x)", "torch.tanh(x)", "torch.relu(x)", "x * 0.25", "x * 7", "F.dropout(x, 0.0)")
    return w.line(f"x = {w.rng.choice(functions)}")


@piece(3)
def norm(w: Writer) -> bool:
    if w.width < 8:
        return False
    kind = w.rng.choice(("nn.LayerNorm({})", "nn.RMSNorm({})", "nn.LayerNorm({}, elementwise_affine=False)"))
    return w.line(f"x = {w.layer(kind.format(w.width))}(x)")


@piece()
def softmax(w: Writer) -> bool:
    return w.line("x = torch.softmax(x, -1) * 4")


@piece(2)
def reshape(w: Writer) -> bool:
    *front, width = w.shape
    if width % 2 == 0 and width > 16 and w.rng.random() < 0.5:
        return w.line(f"x = x.reshape({w.rows * 2}, {width // 2})", (w.rows * 2, width // 2))
    if w.rows % 2 == 0 and w.rows and w.rng.random() < 0.5:
        return w.line(f"x = x.reshape(2, {w.rows // 2}, {width})", (2, w.rows // 2, width))
    w.flat()
    return True


@piece(2)
def permute(w: Writer) -> bool:
    if len(w.shape) == 3:
        b, t, d = w.shape
        if d < 8 or (t >= 8 and w.rng.random() < 0.4):
            return w.line("x = x.permute(0, 2, 1)", (b, d, t)) if t else False
        return w.line("x = x.transpose(0, 1)", (t, b, d))
    if len(w.shape) == 2 and w.shape[0] >= 8:
        return w.line("x = x.t()", w.shape[::-1])
    return False


@piece(2)
def part(w: Writer) -> bool:
    *front, width = w.shape
    how = w.rng.choice(("columns", "every other column", "rows", "flip", "roll"))
    if how == "columns" and width > 20:
        return w.line("x = x[..., 3:-1]", w.to(width - 4))
    if how == "every other column" and width >= 32:
        return w.line("x = x[..., ::2]", w.to((width + 1) // 2))
    if how == "rows" and front[0] > 2:
        return w.line("x = x[1:]", (front[0] - 1, *front[1:], width))
    if how == "flip":
        return w.line("x = x.flip(-1)")
    return w.line("x = x.roll(1, -1)") if how == "roll" else False


@piece(2)
def cut_and_join(w: Writer) -> bool:
    how = w.rng.choice(("chunk", "cat", "stack", "pad", "split"))
    if how in ("chunk", "split") and w.width >= 16:
        name = w.name("parts")
        w.line(f"{name} = x.{'chunk(2, -1)' if how == 'chunk' else f'split([5, {w.width - 5}], -1)'}")
        return w.line(f"x = torch.cat([{name}[1], {name}[0] * 2], -1)")
    if how == "cat" and w.width <= 75:
        return w.line("x = torch.cat([x, torch.relu(x)], -1)", w.to(2 * w.width))
    if how == "stack":
        return w.line("x = torch.stack([x, x * 0.5], 0).sum(0)")
    if how == "pad":
        return w.line("x = F.pad(x, (1, 2))", w.to(w.width + 3))
    return False


@piece()
def one_row(w: Writer) -> bool:
    if len(w.shape) < 2 or not w.rows:
        return False
    how = w.rng.choice(("x.mean(0, keepdim=True)", "x[-1:]", "x[:1].clone()"))
    return w.line(f"x = {how}", (1, *w.shape[1:]))


@piece()
def expand(w: Writer) -> bool:
    if w.shape[0] != 1:
        return False
    return w.line(f"x = x.expand(3, {', '.join(['-1'] * (len(w.shape) - 1))})", (3, *w.shape[1:]))


@piece(2)
def remember(w: Writer) -> bool:
    name = w.name("kept")
    w.remembered.append((name, w.shape))
    return w.line(f"{name} = x")


@piece(2)
def recall(w: Writer) -> bool:
    if not w.remembered:
        return False
    name, shape = w.rng.choice(w.remembered)
    if shape == w.shape:
        return w.line(f"x = x + {name}")
    if shape[:-1] == w.shape[:-1]:
        return w.line(f"x = torch.cat([x, {name}], -1)", w.to(shape[-1] + w.width))
    return False


@piece()
def written_in_place(w: Writer) -> bool:
    if w.width == 1:
        return False  # writing all of x would leave the gradient before it unused: a graph has no product for that
    w.line("x = x.clone()")
    return w.line(w.rng.choice(("x.mul_(0.5)", "x.add_(1)", "x[..., :1] = 0", "x.relu_()")))


@piece(2)
def graph_break(w: Writer) -> bool:
    return w.line("torch._dynamo.graph_break()")


@piece(2)
def further_output(w: Writer) -> bool:
    """Another output: a tensor of its own, or one that shares memory with x."""
    name = w.name("out")
    how = w.rng.choice(("x", "x * 2", "x[..., :4]", "x.detach()", "x.transpose(0, -1)", "x.sum()"))
    w.outputs.append(name)
    return w.line(f"{name} = {how}")


@piece()
def without_gradient(w: Writer) -> bool:
    out = w.rng.choice((16, 32, 40))
    layer, name = w.layer(f"nn.Linear({w.width}, {out})"), w.name("still")
    w.line("with torch.no_grad():")
    w.line(f"    {name} = torch.tanh({layer}(x))")
    other = w.layer(f"nn.Linear({w.width}, {out})")
    return w.line(f"x = {other}(x) + {name}", w.to(out))


@piece()
def cast(w: Writer) -> bool:
    return w.line("x = x.to(self.low).to(x.dtype)")


@piece()
def inner_autocast(w: Writer) -> bool:
    out = w.new_width()
    layer = w.layer(f"nn.Linear({w.width}, {out})")
    w.line('with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):')
    w.line(f"    y = {layer}(x)")
    return w.line("x = y.to(x.dtype)", w.to(out))
