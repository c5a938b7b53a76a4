"""A gemm of NVIDIA's own library as operations of a graph: what those of FP8, MXFP8 and NVFP4 have in common.

    fp8_compile::<name>(...) -> y              fp8_compile::<name>.out(..., *, out=y) -> y

On other devices than GPUs both compute the formula. On a GPU, cuBLASLt computes it once small gemms there gave what the
formula gives; where it can't be called directly, or knows no kernel for a shape, ``torch._scaled_mm`` does, in several
steps, after a warning.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import warnings
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8_compile.kernels.define_op import define

from .cublaslt import CublasLt, CublasLtError, Gemm
from .cublaslt_compiled import CompiledCublasLt, fastest

Library = CublasLt | CompiledCublasLt
Given = TypeVar("Given", bound="tuple[Any, ...]")


class GemmOp(abc.ABC, Generic[Given]):
    """One kind of operands. Each is a tuple with names, in the order in which the operation takes its arguments."""

    name: str
    title: str  # of the format, in warnings
    takes: type[Given]
    arguments: str  # of the operation's schema

    def __init__(self) -> None:
        self._libraries: dict[int, Library | None] = {}
        returns, writes = f"{self.name}({self.arguments}) -> Tensor", f"{self.name}.out({self.arguments}, *, "
        self.op = define(returns, self._plain, self._new, cuda=self._multiply)
        self.out_op = define(f"{writes}Tensor(a!) out) -> Tensor(a!)", self._plain_out, None, cuda=self.multiply_out)
        register_flop_formula(self.op.overloadpacket)(self._flops)

    @abc.abstractmethod
    def reference(self, given: Given) -> Tensor:
        """The formula in plain PyTorch."""

    @abc.abstractmethod
    def by_torch(self, given: Given, y: Tensor) -> None:
        """The formula with torch's own gemm."""

    @abc.abstractmethod
    def gemm(self, given: Given, y: Tensor) -> Gemm:
        """What cuBLASLt is asked for."""

    @abc.abstractmethod
    def probes(self, device: torch.device, any_layout: bool) -> Iterator[Given]:
        """Small gemms with numbers that are exact in bf16; with ``any_layout`` in every layout."""

    @abc.abstractmethod
    def size(self, left: Any, right: Any) -> tuple[Any, Any]:
        """M and N, of the shapes of both operands."""

    def require(self, given: Given) -> None:
        """Refuse operands that the formula is not for."""

    def by_cublaslt(self, library: Library, given: Given, y: Tensor) -> None:
        """The formula with cuBLASLt, on the current stream."""
        if y.numel():
            stream = torch._C._cuda_getCurrentRawStream(y.device.index) if y.is_cuda else 0
            library.multiply(self.gemm(given, y), stream=stream)

    def check(self, library: Library, device: torch.device, *, any_layout: bool = False) -> None:
        """Compute small gemms; ``CublasLtError`` if one of them is wrong."""
        for given in self.probes(device, any_layout):
            expected = self.reference(given)
            got = torch.empty_like(expected)
            self.by_cublaslt(library, given, got)
            if not torch.equal(got, expected):
                raise CublasLtError(f"the result of a small {self.title} gemm was wrong")

    def library_of(self, device: int) -> Library | None:
        """cuBLASLt on a device, once it has passed ``check``; a warning says why not."""
        if device not in self._libraries:
            library = _open(device)
            try:
                if library is not None:
                    any_layout = torch.cuda.get_device_capability(device)[0] == 10
                    self.check(library, torch.device("cuda", device), any_layout=any_layout)
            except CublasLtError as error:
                _warn(f"cuda:{device}, {self.title}", error)
                library = None
            self._libraries[device] = library
        return self._libraries[device]

    def multiply_out(self, *arguments: Any, out: Tensor, **options: Any) -> Tensor:
        """The operation on a GPU."""
        given = self.takes(*arguments, **options)
        library = self.library_of(out.device.index)
        if library is not None:
            try:
                self.by_cublaslt(library, given, out)
                return out
            except CublasLtError as error:  # a shape that it has no kernel for
                _warn(str(tuple(out.shape)), error)
        self.by_torch(given, out)
        return out

    def _multiply(self, *arguments: Any, **options: Any) -> Tensor:
        return self.multiply_out(*arguments, **options, out=self._new(*arguments, **options))

    def _plain(self, *arguments: Any, **options: Any) -> Tensor:
        given = self.takes(*arguments, **options)
        self.require(given)
        return self.reference(given)

    def _plain_out(self, *arguments: Any, out: Tensor, **options: Any) -> Tensor:
        return out.copy_(self._plain(*arguments, **options))

    def _new(self, *arguments: Any, **options: Any) -> Tensor:
        given: Any = self.takes(*arguments, **options)
        return given.left.new_empty(self.size(given.left.shape, given.right.shape), dtype=given.out_dtype)

    def _flops(self, left: Any, right: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
        """The partitioner weighs by it what to compute again; ``left`` and ``right`` are sizes."""
        m, n = self.size(left, right)
        return 2 * m * n * self.inner(left)

    def inner(self, left: Any) -> Any:
        """K, of the left operand's shape."""
        return left[1]


@functools.cache
def _open(device: int) -> Library | None:
    """cuBLASLt on a device; a warning says why not."""
    try:
        return fastest(ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}"))
    except (OSError, CublasLtError) as error:
        _warn(f"cuda:{device}", error)
        return None


def _warn(where: str, error: Exception) -> None:
    warnings.warn(
        f"{where}: FP8 gemms copy operands and add residuals in steps of their own, which costs passes over memory, "
        f"because cuBLASLt could not be used directly: {error}",
        stacklevel=2,
    )


def with_k_contiguous(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Operands [M, K] and [K, N] as ``torch._scaled_mm`` takes them: copied where K is not contiguous."""
    left = left if left.stride(1) == 1 else left.contiguous()
    return left, right if right.stride(0) == 1 else right.t().contiguous().t()


def probe_numbers(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices of zeros and ones, FP32, and one to add, bf16."""
    numbers = torch.arange(size * size, device=device).view(size, size)
    ones = [(numbers % prime == 0).float() for prime in (7, 5)]
    return ones[0], ones[1], (numbers % 11).to(torch.bfloat16)
