"""Adversarial training of a model whose inputs are too long for one device: every process holds a part of each.

    torchrun --nproc-per-node 4 examples/torch_distributed.py

The samples are DTensors that are sharded along their features, and so is the model's first layer. Every step takes the
gradient of the loss in x, gives it a norm of exactly eps after clipping, and trains on the result. What the processes
say to each other for that is counted: a few numbers per sample, no part of x.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import clipaware as ca


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--features", type=int, default=100_000)
    parser.add_argument("--eps", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        train(options, init_device_mesh(device, (dist.get_world_size(),)))
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace, mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
    torch.manual_seed(0)  # on all processes, of which each keeps its part
    x = torch.rand(options.samples, options.features)
    labels = (torch.arange(options.samples) % 2).to(mesh.device_type)
    x[1::2, ::10] *= 0.5  # what there is to be learned
    x = distribute_tensor(x.to(mesh.device_type), mesh, [Shard(1)])
    first = distribute_tensor(torch.randn(options.features, 8).to(mesh.device_type) * 1e-3, mesh, [Shard(0)])
    last = distribute_tensor(torch.randn(8, 2).to(mesh.device_type), mesh, [Replicate()])
    parameters = [first.requires_grad_(), last.requires_grad_()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def loss_of(x: DTensor) -> torch.Tensor:
        hidden = torch.tanh((x @ first).redistribute(placements=[Replicate()]))
        return torch.nn.functional.cross_entropy((hidden @ last).to_local(), labels)

    for step in range(options.steps):
        leaf = x.detach().requires_grad_()
        (direction,) = torch.autograd.grad(loss_of(leaf), leaf)
        with CommDebugMode() as said:
            v = ca.perturb(x, direction, options.eps)
        loss = loss_of(v)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norms = (v - x).to_local().double().square().sum(1)
        dist.all_reduce(norms)  # for this line only
        off = float((norms.sqrt() / options.eps - 1).abs().max())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, norms off by {off:.1e}, {said.get_total_counts()} collectives")
        assert off < 3e-7


if __name__ == "__main__":
    main()
