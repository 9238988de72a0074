"""One process of a tensor-parallel world, as ``torch.distributed.run`` starts it.

Two layers, columns then rows, against the same layers on one device. The argument is the backend,
``nccl`` or ``gloo``.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import cute_fp8
from cute_fp8.models.linear import VARIANTS
from cute_fp8.models.tensor_parallel import RowwiseParallel


def main(backend: str) -> None:
    """Exits with an error if a rank's result is wrong."""
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    for variant in VARIANTS:
        torch.manual_seed(0)
        layers = nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)
        model = nn.Sequential(*layers).to(device, torch.bfloat16)
        with torch.no_grad():
            model[2].bias.add_(3)  # a second one would show
        cute_fp8.convert(model, variant=variant)
        x = torch.randn(40, 512).to(device, torch.bfloat16)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        with torch.no_grad():
            whole = model(x)
            sharded = parallelize_module(model, mesh, plan, src_data_rank=None)
            verdict = cute_fp8.near_lossless(sharded(x), whole)
        assert verdict.passed, f"rank {dist.get_rank()}, {variant}: {verdict}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
