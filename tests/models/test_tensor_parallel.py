"""Tensor parallelism: two processes give what one gives, and the bias is added once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import cute_fp8
from cute_fp8.models import tensor_parallel
from cute_fp8.models.linear import VARIANTS
from cute_fp8.models.tensor_parallel import RowwiseParallel
from cute_fp8.reference_linear import fp8_w8a8_linear, mxfp8_linear

RANKS = 2
K, HIDDEN, N, M = 128, 96, 64, 6
BF16 = torch.bfloat16


class Mlp(nn.Module):
    """Two layers, as tensor parallelism cuts them: columns, then rows."""

    def __init__(self, variant: str):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = (self.layer(*size, variant, generator) for size in sizes())

    @staticmethod
    def layer(n: int, k: int, variant: str, generator: torch.Generator) -> cute_fp8.Linear:
        linear = nn.Linear(k, n, dtype=BF16)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(n, k, generator=generator) / k**0.5)
            linear.bias.copy_(torch.randn(n, generator=generator) + 3)  # a second one would show
        return cute_fp8.Linear.from_linear(linear, variant)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.relu(self.up(x)))


def sizes() -> tuple[tuple[int, int], tuple[int, int]]:
    return (HIDDEN * RANKS, K), (N, HIDDEN * RANKS)


def tokens() -> Tensor:
    return torch.randn(2, M // 2, K, generator=torch.Generator().manual_seed(1)).to(BF16)


def by_hand(model: Mlp, x: Tensor) -> Tensor:
    """The parallel result, computed on one device: each half of the hidden channels by itself."""
    linear = {"per_token": fp8_w8a8_linear, "mxfp8": mxfp8_linear}[model.down.variant]
    hidden = torch.nn.functional.relu(model.up(x))
    total = torch.zeros((*x.shape[:-1], N), dtype=BF16)
    for rank in range(RANKS):
        part = slice(rank * HIDDEN, (rank + 1) * HIDDEN)
        codes = model.down.weight.detach()[:, part].contiguous()
        scale = model.down.weight_scale.detach()
        if model.down.variant == "mxfp8":
            scale = scale[:, rank * HIDDEN // 32 : (rank + 1) * HIDDEN // 32].contiguous()
        else:
            scale = scale.reshape(-1)
        total = total + linear(hidden[..., part].contiguous(), codes, scale)
    return total + model.down.bias


def in_ranks(work: Callable[[], None], tmp_path: Path) -> None:
    """Run ``work`` in two processes with gloo; a failure of either fails the test."""
    context = torch.multiprocessing.get_context("fork")
    children = [context.Process(target=rank, args=(r, work, tmp_path)) for r in range(RANKS)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    status = [child.exitcode for child in children]
    errors = "\n".join(path.read_text() for path in sorted(tmp_path.glob("error*")))
    assert status == [0] * RANKS, errors


def rank(number: int, work: Callable[[], None], folder: Path) -> None:
    import traceback

    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=number, world_size=RANKS
        )
        work()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error{number}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def parallel(model: Mlp) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan, src_data_rank=None)  # gloo sends no float8


@pytest.mark.parametrize("variant", VARIANTS)
def test_columns_then_rows(variant: str, tmp_path: Path) -> None:
    """Equal to the parts computed by hand, to the bit; near the unsharded layers' result."""
    x = tokens()
    model = Mlp(variant)
    expected, whole = by_hand(model, x), model(x)
    assert cute_fp8.near_lossless(expected, whole).passed

    def work() -> None:
        sharded = parallel(Mlp(variant))
        assert sharded.up.weight.to_local().shape == (HIDDEN, K)
        assert sharded.down.weight.to_local().shape == (N, HIDDEN)
        with torch.inference_mode(dist.get_rank() == 0):
            y = sharded(x)
        assert type(y) is Tensor
        torch.testing.assert_close(y, expected, rtol=0, atol=0)

    in_ranks(work, tmp_path)


def test_layouts_of_the_output(tmp_path: Path) -> None:
    """A sharded output gets its shard of the bias; another module is torch's own business."""
    model = Mlp("per_token")
    hidden = torch.randn(M, HIDDEN * RANKS, generator=torch.Generator().manual_seed(2)).to(BF16)
    linear = nn.Linear(HIDDEN * RANKS, N)

    def work() -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        mine = slice(dist.get_rank() * HIDDEN, (dist.get_rank() + 1) * HIDDEN)
        local = hidden[:, mine].contiguous()
        whole = parallelize_module(Mlp("per_token").down, mesh, RowwiseParallel())(local)
        for dim, size in ((-1, N // RANKS), (0, M // RANKS)):
            style = RowwiseParallel(output_layouts=Shard(dim), use_local_output=False)
            y = parallelize_module(Mlp("per_token").down, mesh, style)(local)
            assert isinstance(y, DTensor) and y.to_local().shape[dim] == size
            assert torch.equal(y.full_tensor(), whole)
        plain = parallelize_module(linear, mesh, RowwiseParallel())
        torch.testing.assert_close(plain(local.float()), linear_expected)

    linear_expected = linear(hidden.float())
    assert cute_fp8.near_lossless(by_hand(model, tokens()), model(tokens())).passed
    in_ranks(work, tmp_path)


def test_refusals(tmp_path: Path) -> None:
    """One line each, before any communication."""

    def work() -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        odd = cute_fp8.Linear(48, 16)
        with pytest.raises(ValueError, match=r"got K = 48 on 2 devices, must divide: K = 24 is"):
            parallelize_module(odd, mesh, RowwiseParallel())
        layer = parallelize_module(cute_fp8.Linear(64, 16), mesh, RowwiseParallel())
        with pytest.raises(TypeError, match=r"x: got Tensor, must be a DTensor"):
            tensor_parallel.forward(layer, torch.zeros(2, 64))
        x = DTensor.from_local(torch.zeros(2, 64), mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"x: got placement R.*, must be S"):
            tensor_parallel.forward(layer, x)

    in_ranks(work, tmp_path)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_started_as_torchrun_does(backend: str) -> None:
    """Processes of their own; with NCCL where there are two GPUs."""
    if backend == "nccl" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, there are {torch.cuda.device_count()}")
    script = Path(__file__).parents[1] / "helpers" / "tensor_parallel_world.py"
    root = str(Path(cute_fp8.__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), backend],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
