"""Operations that bend gradients see them without the loss scale; a plain backward has none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from uncompiled import UncompiledBackend

from fp8_compile import Config
from fp8_compile.passes.graph_pass import PassReport
from fp8_compile.passes.joint.unscale_nonlinear import UnscaleNonlinear

D = 32
BENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda g: g.clamp(-1e-4, 1e-4),
    "clip by norm": lambda g: g * (1e-3 / (g.norm() + 1e-6)).clamp(max=1.0),
    "square": lambda g: g * g * 1e3,
    "sign": lambda g: 1e-3 * g.sign(),
    "affine": lambda g: g + 1e-3,
    "threshold": lambda g: torch.where(g.abs() > 1e-4, torch.zeros_like(g), g),
    "fill": lambda g: torch.where(g.abs() > 1e-4, 1e-4, g),
    "normalize": lambda g: g / (g.std() + 1e-8) * 1e-3,
    "soft clip": lambda g: 1e-4 * torch.tanh(g / 1e-4),
}


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations were taken for ones that bend, graph by graph."""
    found: list[int] = []
    run = UnscaleNonlinear.run

    def counting(self: UnscaleNonlinear, graph: torch.fx.Graph) -> PassReport:
        report = run(self, graph)
        found.append(report.changes)
        return report

    monkeypatch.setattr(UnscaleNonlinear, "run", counting)
    return found


class Bent(nn.Module):
    def __init__(self, bend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.bend = nn.Linear(D, D), nn.Linear(D, D), bend

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.register_hook(self.bend)
        return self.second(h).square().mean()


@pytest.mark.parametrize("name", BENDS)
def test_a_hook_gives_the_gradients_it_gives_without_a_loss_scale(name: str, changes: list[int]) -> None:
    model, x = Bent(BENDS[name]), torch.randn(16, D)
    found = []
    for loss_scale in (None, 2.0**16):
        torch._dynamo.reset()
        model.zero_grad()
        backend = UncompiledBackend(Config(recipe="tensorwise", loss_scale=loss_scale))
        torch.compile(model, backend=backend, fullgraph=True)(x).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert changes and changes[-1] > 0
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Ordinary(nn.Module):
    """A bit of everything that layers do backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.norm = nn.Embedding(64, D), nn.Conv1d(D, D, 3, padding=1), nn.BatchNorm1d(D)
        self.layer = nn.TransformerEncoderLayer(D, 2, 64, dropout=0.1, activation="gelu", batch_first=True)
        self.rms, self.gate, self.up = nn.RMSNorm(D), nn.Linear(D, 64), nn.Linear(D, 64)
        self.pool, self.out = nn.MaxPool1d(2), nn.Linear(64, 64)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.norm(F.relu(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        x = self.rms(self.layer(x))
        x = F.dropout(F.silu(self.gate(x)) * torch.sigmoid(self.up(x)), 0.1)
        scores = torch.softmax(x @ x.transpose(1, 2) / 8, -1).masked_fill(torch.eye(x.shape[1]) > 0, 0.0)
        x = self.pool(self.out(scores @ x).transpose(1, 2)).transpose(1, 2)
        x = torch.cat([x[:, ::2], F.pad(x[:, 1:2], (0, 0, 0, 1))], 1).clamp(-3, 3).abs()
        loss = F.cross_entropy(x.flatten(0, 1), targets[:, : x.shape[1]].flatten(), label_smoothing=0.1)
        return loss + 0.01 * x.logsumexp(-1).square().mean() + x.var(0).mean() + x.amax(-1).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_unscaled_in_the_backward_of_ordinary_layers(dtype: torch.dtype, changes: list[int]) -> None:
    model = Ordinary().to(dtype)
    tokens = torch.randint(0, 64, (4, 16))
    backend = UncompiledBackend(Config(recipe="tensorwise", loss_scale=2.0**16))
    torch.compile(model, backend=backend)(tokens, tokens).backward()
    assert changes and not any(changes)
