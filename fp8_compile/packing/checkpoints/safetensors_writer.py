"""Write tensors to a safetensors file one after the other, so that no more than one has to be in memory."""

from __future__ import annotations

import json
import pathlib
import struct
from typing import Any, BinaryIO, Mapping

import torch
from torch import Tensor

from fp8_compile.whole_files import whole_file

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SafetensorsWriter:
    """Writes one safetensors file; ``described`` says what will come, in that order: name -> (dtype, shape)."""

    def __init__(self, file: BinaryIO, described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.file, self.left = file, dict(described)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, shape) in described.items():
            size = dtype.itemsize * int(torch.Size(shape).numel())
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, tensor: Tensor) -> None:
        expected = next(iter(self.left), None)
        if name != expected or self.left[name] != (tensor.dtype, tuple(tensor.shape)):
            raise AssertionError(
                f"{name} {tensor.dtype} {tuple(tensor.shape)}, expected {expected} {self.left.get(name)}"
            )
        del self.left[name]
        if tensor.numel():
            self.file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        if self.left:
            raise AssertionError(f"not written: {', '.join(self.left)}")


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors that are all in memory."""
    with whole_file(path) as file:
        writer = SafetensorsWriter(file, {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()})
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.close()
