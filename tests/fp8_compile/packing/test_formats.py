"""Formats as objects: what they store is what they read, and a new one needs no other code."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_compile import load_checkpoint, pack, save_checkpoint
from fp8_compile.kernels.fp8_weight import FP8Weight
from fp8_compile.packing.checkpoints.layouts import FP8InCompressedTensors, Layout
from fp8_compile.packing.formats import FORMATS, Format, FP8Format, format_of, format_of_matrix
from fp8_compile.packing.packed_experts import FP8Stack
from fp8_compile.packing.packed_linear import FP8Linear

each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
each_layout = pytest.mark.parametrize(
    "format, layout",
    [(format, layout) for format in FORMATS.values() for layout in format.layouts],
    ids=[f"{format.name}-{layout.name}" for format in FORMATS.values() for layout in format.layouts],
)


def tensors_of(matrix: Any) -> list[Tensor]:
    values = matrix if isinstance(matrix, tuple) else vars(matrix).values()
    return [value for value in values if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(left: Any, right: Any) -> bool:
    pairs = zip(tensors_of(left), tensors_of(right), strict=True)
    return all(a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b)) for a, b in pairs)


@each_layout
def test_what_a_layout_stores_it_has_described_and_reads_again(format: Format[Any], layout: Layout[Any]) -> None:
    matrix = format.quantize(torch.randn(24, 64), format.method(None, False), None, name="a.b")
    tensors = layout.tensors("a.b", matrix)
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    assert kinds == layout.described("a.b", (24, 64)) and {f"a.b.{part}" for part in layout.parts} == set(kinds)
    read = layout.read("a.b", tensors)
    assert format_of_matrix(read) is format and read.shape == (24, 64)
    torch.testing.assert_close(read.dequantize(), matrix.dequantize(), rtol=2e-7, atol=0.0)  # 1 / (1 / scale)


@each_format
def test_rows_that_are_put_together_again_are_the_matrix(format: Format[Any]) -> None:
    matrix = format.quantize(torch.randn(144, 32), format.method(None, False), None, name="w")
    top, bottom = format.rows(matrix, slice(0, 128)), format.rows(matrix, slice(128, 144))
    assert top.shape == (128, 32) and bottom.shape == (16, 32)
    assert torch.equal(top.dequantize(), matrix.dequantize()[:128])
    assert same(format.concatenate([top, bottom], "w"), matrix)


@each_format
def test_a_packed_module_gives_back_the_matrix_and_knows_its_format(format: Format[Any]) -> None:
    matrices = [format.quantize(torch.randn(24, 32), format.method(None, False), None, name="w") for _ in range(2)]
    layer = nn.Linear(32, 24)
    format.linear.convert(layer, matrices[0], torch.float32, None)
    stack = format.stack.of(matrices, torch.float32, False)
    assert format_of(layer) is format_of(stack) is format
    assert isinstance(layer, format.linear) and same(layer.matrix(), matrices[0])
    assert same(stack.matrix(1), matrices[1])


class Halved(FP8Weight):
    """Half of what FP8 is, so that it can be told apart."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().dequantize(dtype) / 2


class HalvedLinear(FP8Linear):
    def matrix(self) -> Halved:
        return Halved(self.codes, self.scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().dequantize(dtype) / 2


class HalvedStack(FP8Stack):
    pass


class HalvedLayout(FP8InCompressedTensors):
    parts = ("weight", "half_scale")
    own = ("half_scale",)

    def tensors(self, layer: str, weight: FP8Weight, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        return {f"{layer}.weight": weight.codes, f"{layer}.half_scale": weight.scales}

    def read(self, layer: str, tensors: Any) -> FP8Weight:
        return Halved(tensors[f"{layer}.weight"], tensors[f"{layer}.half_scale"])


class HalvedFormat(FP8Format):
    name, title = "halved", "Halved"
    matrix, linear, stack, layouts = Halved, HalvedLinear, HalvedStack, (HalvedLayout(),)

    def quantize(self, *args: Any, **options: Any) -> FP8Weight:
        return Halved(*super().quantize(*args, **options))


def test_a_new_format_is_one_object(tmp_path: pathlib.Path) -> None:
    """It packs, reports, is saved and loaded, and mixes with others."""
    others = dict(FORMATS)
    FORMATS.clear()
    try:
        FORMATS.update({"halved": HalvedFormat(), **others})
        model = nn.ModuleDict({"a": nn.Linear(32, 24), "b": nn.Linear(32, 24)})
        before = model["a"].weight.detach().clone()
        report = pack(model, "halved", progress=False)
        assert {row.format for row in report.packed} == {"halved"} and len(report.packed) == 2
        torch.testing.assert_close(model["a"].weight, before / 2, rtol=2**-4, atol=0.01)
        save_checkpoint(model, tmp_path)
        loaded = load_checkpoint(nn.ModuleDict({"a": nn.Linear(32, 24), "b": nn.Linear(32, 24)}), tmp_path)
        assert isinstance(loaded["b"], HalvedLinear) and torch.equal(loaded["b"].weight, model["b"].weight)
        mixed = nn.ModuleDict({"a": loaded["a"], "c": nn.Linear(32, 16)})
        pack(mixed, "nvfp4", progress=False)
        save_checkpoint(mixed, tmp_path)
        again = load_checkpoint(nn.ModuleDict({"a": nn.Linear(32, 24), "c": nn.Linear(32, 16)}), tmp_path)
        assert isinstance(again["a"], HalvedLinear) and torch.equal(again["c"].weight, mixed["c"].weight)
        with pytest.raises(ValueError, match="expected one of: halved, nvfp4, fp8"):
            pack(nn.Linear(16, 16), "fp4")
    finally:
        FORMATS.clear()
        FORMATS.update(others)
