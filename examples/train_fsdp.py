"""Train a byte language model in FP8 with FSDP2: the same file runs two processes on one machine, or many on many.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --steps 40 --checkpoint /tmp/byte_lm
    torchrun --nproc-per-node 2 examples/train_fsdp.py --steps 80 --checkpoint /tmp/byte_lm      # goes on from there
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint host:29500 examples/train_fsdp.py ...

Three lines are not those of any FSDP2 script: ``torch.compile(..., backend="fp8")``, ``attach``, which gives all ranks
the same scales, and the scaling state in the checkpoint. A checkpoint fits any number of ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

import fp8_compile
from byte_lm import ByteLM, batches, stdlib_text
from fp8_compile.scaling.distributed_checkpoint import load_scaling_state


def start() -> torch.device:
    """Join the other processes, and return the device of this one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def sharded_model(device: torch.device, layers: int, width: int) -> ByteLM:
    torch.manual_seed(0)  # every rank begins with the same weights and keeps its part of them
    model = ByteLM(layers, width, heads=4, context=64).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save(folder: Path, model: ByteLM, optimizer: torch.optim.Optimizer, step: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    scaling = fp8_compile.scaling_state(model).state_dict()
    state = {"model": weights, "optimizer": moments, "scaling": scaling, "step": step}
    dcp.save(state, checkpoint_id=folder)


def load(folder: Path, model: ByteLM, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint and return the step at which it was saved."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    load_scaling_state(model, folder)
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 64 bytes on each rank")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to at the end")
    arguments = parser.parse_args()

    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded_model(device, arguments.layers, arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    compiled = torch.compile(model, backend="fp8")
    fp8_compile.attach(compiled, optimizer)

    done = 0
    if arguments.checkpoint and (arguments.checkpoint / ".metadata").exists():
        done = load(arguments.checkpoint, model, optimizer)
    # Each step of each rank has a seed of its own: a run that is resumed sees what one without a break sees.
    text = stdlib_text()
    bar = tqdm(range(done, arguments.steps), disable=rank > 0, unit="step")
    for step in bar:
        generator = torch.Generator().manual_seed(step * ranks + rank)
        tokens, targets = next(batches(text, batch=arguments.batch, time=64, generator=generator))
        loss = compiled(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        bar.set_postfix(nats_a_byte=f"{float(mean) / ranks:.3f}")
    if arguments.checkpoint:
        save(arguments.checkpoint, model, optimizer, arguments.steps)
    if rank == 0 and done < arguments.steps:
        print(f"{ranks} ranks, steps {done} to {arguments.steps}: loss {float(mean) / ranks:.4f} nats per byte")
        print(fp8_compile.scaling_state(model))  # how many tensors are scaled, and which of them lost numbers
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
