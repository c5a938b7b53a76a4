"""export of packed experts: both formats, rows in groups and one by one, without Python."""

from __future__ import annotations

import pathlib

import torch
from mixtures import experts, routed
from torch import nn

from fp8_compile import export, load, pack


class Mixtures(nn.Module):
    """Rows in groups on NVFP4 and FP8, then each with an expert of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.gathered = experts("grouped_mm"), experts("batched_mm")

    def forward(self, hidden: torch.Tensor, which: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.gathered(self.grouped(hidden, which, weights), which, weights)


def test_a_package_runs_from_packed_experts_for_any_number_of_tokens(tmp_path: pathlib.Path) -> None:
    model = Mixtures().eval()
    pack(model, "nvfp4", method="rtn", include=("grouped.gate_up_proj", "gathered.down_proj"), progress=False)
    pack(model, "fp8", progress=False)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    report = export(model, routed(6), tmp_path / "m.pt2", dynamic_shapes=[{0: tokens}] * 3)
    assert sorted(row.formats[1] for row in report.rewritten) == ["e2m1", "e2m1", "e4m3", "e4m3"] and not report.skipped
    loaded = load(tmp_path / "m.pt2")
    for count in (6, 33):
        given = routed(count)
        torch.testing.assert_close(loaded(*given), model(*given), rtol=1e-4, atol=1e-4)


def test_the_exported_program_has_the_products_on_the_packed_form() -> None:
    model = Mixtures().eval()
    pack(model, method="rtn", progress=False)
    program = export(model, routed(6), format="exported_program")
    names = [node.target.__name__ for node in program.graph.nodes if "experts" in str(node.target)]
    assert names == ["nvfp4_experts_mm.default"] * 4
    given = routed(6)
    torch.testing.assert_close(program.module()(*given), model(*given), rtol=1e-4, atol=1e-4)
