"""Lower a training step for a GPU that is not there, and count what its generated code does.

    with absent_gpu(90) as gpu:
        step = gpu.training_step(make_model, make_inputs, backend="fp8", options={"target": "cuda:90"})
    step.triton_kernels, step.gemms, step.bytes_outside_gemms, step.forward, step.backward

The step is traced on fake CPU tensors. Each graph that reaches Inductor is moved to ``cuda`` and lowered, scheduled and
written as on a machine with that GPU: a stand-in answers the questions about the device and about Triton's driver.
Nothing is executed, and no tensor is allocated. After the ``with`` the machine has no GPU again: what Inductor
remembers of its devices is forgotten on both sides.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch
import torch._inductor.codegen.cuda.cuda_env as cuda_env
import torch._inductor.utils as inductor_utils
import torch.utils._triton as triton_queries
import triton
from count_launches import Launch, Step, launches_of
from torch import fx, nn
from torch._dynamo import device_interface
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CacheBase
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from triton.backends.compiler import GPUTarget

GPU = torch.device("cuda", 0)
# Of an H100, but for the capability. They steer block sizes, and no count.
PROPERTIES = {
    "total_memory": 80 << 30,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
    "L2_cache_size": 50 << 20,
    "uuid": "0",
    "gcnArchName": "",
}


@contextlib.contextmanager
def absent_gpu(capability: int = 90) -> Iterator[AbsentGpu]:
    """Inside, torch and Triton find one GPU of that compute capability: 90 (H100), 100 (B200), 120 (RTX 5090)."""
    device_interface.get_registered_device_interfaces()  # once a process: before there is a device to register
    # The no-op guard that FakeTensorMode sets wherever there is no GPU, for fake tensors on one. It stays.
    torch._C._ensureCUDADeviceGuardSet()
    _forget_devices()
    try:
        with contextlib.ExitStack() as stack:
            for patch in _stand_ins(capability):
                stack.enter_context(patch)
            yield AbsentGpu()
    finally:
        torch._dynamo.reset()
        _forget_devices()


class AbsentGpu:
    """What ``absent_gpu`` gives."""

    def training_step(
        self,
        make_model: Callable[[], nn.Module],
        make_inputs: Callable[[], Sequence[torch.Tensor]],
        *,
        backend: Any = "inductor",
        options: Mapping[str, Any] | None = None,
        convert: Callable[[nn.Module], nn.Module] | None = None,
    ) -> Step:
        """Lower forward and backward of ``model(*inputs).sum()``; ``convert`` may change the model before."""
        torch._dynamo.reset()
        lowering = _Lowering()
        with torch.device("meta"):
            model = make_model()
        model = convert(model) if convert else model
        with inductor_utils.fresh_cache(), lowering.instead_of_compiling(), lowering.mode:
            _make_fake(model)
            compiled = torch.compile(model, backend=backend, options=dict(options) if options else None)
            compiled(*make_inputs()).sum().backward()
        return lowering.step()


class _Lowering:
    """Takes Inductor's graphs from it when it would compile them, and counts."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.launches: list[Launch] = []
        self.sources: dict[bool, list[str]] = {False: [], True: []}  # by whether it is a backward

    @contextlib.contextmanager
    def instead_of_compiling(self) -> Iterator[None]:
        compiler = compile_fx._InProcessFxCompile
        original = compiler.codegen_and_compile

        def codegen_and_compile(scheme: Any, gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any):
            outputs = [_value(node) for node in gm.graph.output_node().args[0]]
            inputs = move_to_gpu(gm, inputs)
            with mock.patch.object(GraphLowering, "compile_to_module", lambda graph: self._lower(graph, outputs)):
                return original(scheme, gm, inputs, *args, **kwargs)

        with (
            mock.patch.object(compiler, "codegen_and_compile", codegen_and_compile),
            inductor_config.patch(compile_threads=1, cpp_wrapper=False, fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield

    def _lower(self, graph: GraphLowering, outputs: list[Any]) -> types.SimpleNamespace:
        """The code of one graph; the module made from it returns fake CPU tensors like ``outputs``."""
        with V.set_graph_handler(graph):
            code, _ = graph.codegen()
            self.launches += launches_of(graph.scheduler.nodes, code.value)
        self.sources[bool(graph.is_backward)].append(code.value)

        def call(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            with self.mode:
                return [_like(output, torch.device("cpu")) for output in outputs]

        return types.SimpleNamespace(call=call, runner=None, __file__="<absent GPU>")

    def step(self) -> Step:
        if len(self.sources[False]) != 1 or len(self.sources[True]) != 1:
            counts = f"{len(self.sources[False])} forward and {len(self.sources[True])} backward"
            raise ValueError(f"expected one forward and one backward graph, got {counts}: the model has graph breaks")
        return Step(tuple(self.launches), self.sources[False][0], self.sources[True][0])


# ---- the graph on the GPU -------------------------------------------------------------------------------------------


class _OnGpu(fx.Interpreter):
    """Runs a graph on fake GPU tensors and writes down their values; devices in arguments become the GPU."""

    def run_node(self, node: fx.Node) -> Any:
        def moved(argument: Any) -> Any:
            return GPU if isinstance(argument, torch.device) else argument

        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
        value = super().run_node(node)
        if node.op != "output":
            node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            node.meta["tensor_meta"] = _extract_tensor_metadata(value)
        return value

    def get_attr(self, target: str, args: Any, kwargs: Any) -> Any:
        value = _like(super().get_attr(target, args, kwargs), GPU)
        setattr(self.module, target, value)
        return value


def move_to_gpu(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Change the graph in place; the inputs for it."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    mode = next(value.fake_mode for value in values if isinstance(value, torch.Tensor))
    with mode:
        moved = [_like(value, GPU) for value in inputs]
        _OnGpu(gm).run(*moved)
    gm.recompile()
    return moved


def _make_fake(model: nn.Module) -> None:
    """Parameters and buffers become tensors of the current fake mode, on the CPU.

    ``to_empty`` can't: it would swap tensors that the fake mode already refers to.
    """
    cpu = torch.device("cpu")
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(_like(parameter, cpu), parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _like(buffer, cpu)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _like(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


# ---- the stand-ins --------------------------------------------------------------------------------------------------


class _Driver:
    """Answers for Triton's driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def _stand_ins(capability: int) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Patches of everything that torch and Triton ask about a device while they write code for it."""

    def always(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    def static(value: Any) -> staticmethod:
        return staticmethod(always(value))

    major, minor = divmod(capability, 10)
    properties = types.SimpleNamespace(name=f"sm_{capability}", major=major, minor=minor, **PROPERTIES)
    interface = device_interface.CudaInterface
    yield mock.patch.multiple(
        torch.cuda,
        is_available=always(True),
        device_count=always(1),
        current_device=always(0),
        get_device_properties=always(properties),
        get_device_capability=always((major, minor)),
        get_rng_state=lambda *args: torch.get_rng_state(),
        set_rng_state=always(None),
        set_device=always(None),
        synchronize=always(None),
        is_current_stream_capturing=always(False),  # Dynamo 2.15 asks: in a CUDA build the driver would answer
        _exchange_device=always(0),
        _maybe_exchange_device=always(0),
        _lazy_init=always(None),
    )
    yield mock.patch.object(torch.version, "cuda", "13.0")
    yield mock.patch.multiple(
        interface,
        is_available=static(True),
        get_compute_capability=static(capability),
        get_device_properties=static(properties),
    )
    yield mock.patch.multiple(interface.Worker, get_device_properties=static(properties), current_device=static(0))
    yield mock.patch.dict(device_interface.device_interfaces)
    # Its own looks a number up on the device.
    lookup_seed = torch.ops.prims.inductor_lookup_seed.default
    yield mock.patch.object(lookup_seed, "prim_meta_impl", lambda seeds, index: seeds.new_empty(()))
    yield mock.patch.object(triton.runtime.driver, "_active", _Driver(capability))


def _forget_devices() -> None:
    """Clear what is computed once a process from the devices there are."""
    for module in (inductor_utils, triton_queries, cuda_env):
        for function in vars(module).values():
            if isinstance(function, functools._lru_cache_wrapper) and function.__module__ == module.__name__:
                function.cache_clear()
    DeviceProperties.create.cache_clear()
    CacheBase.get_system.cache_clear()
