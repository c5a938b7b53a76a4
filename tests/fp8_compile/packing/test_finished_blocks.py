"""Blocks that are packed are not computed again, and what is packed after them does not notice."""

from __future__ import annotations

import copy

import pytest
import torch
from speaker import speaker
from torch import Tensor, nn

from fp8_compile import calibrate, pack
from fp8_compile.packing import finished_blocks


def packed(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    pack(model, calibration=calibrate(model, batches, progress=False), progress=False, steps=0, paths=1, passes=0)
    return model.state_dict()


def test_packing_in_sequence_computes_each_finished_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = speaker(steps=0, num_hidden_layers=3)
    batches = [torch.randint(0, 320, (2, 16)) for _ in range(2)]
    twin, calls = copy.deepcopy(model), [0]
    twin.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    with_skips = packed(twin, batches)
    # To calibrate; for o_proj, gate_up and down; and once with all of them packed. The other blocks' groups skip it.
    assert calls[0] == len(batches) * (1 + 3 + 1)
    monkeypatch.setattr(finished_blocks, "LIMIT", 0)
    without = packed(model, batches)
    assert all(torch.equal(with_skips[name].float(), without[name].float()) for name in without)


def test_a_block_that_is_called_twice_is_computed_and_one_that_is_written_to_is_copied() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x).add_(1.0)
            return self.blocks[2](self.blocks[1](self.blocks[1](x)))

    model, x = Twice().eval().requires_grad_(False), torch.randn(4, 16)
    blocks = finished_blocks.FinishedBlocks(model, [f"blocks.{index}.weight" for index in range(3)])
    blocks.packed(["blocks.0.weight", "blocks.1.weight"])
    wanted = model(x)
    for _ in range(3):
        with blocks.remembering(0):
            assert torch.equal(model(x), wanted)
    assert blocks.finished == ["blocks.0"] and "forward" not in vars(model.blocks[0])
