"""Tensor parallelism of :class:`cute_fp8.Linear` on PyTorch's own engine, DTensor.

Columns: ``torch.distributed.tensor.parallel.ColwiseParallel`` as it stands, for every parameter has
its output channels first. Rows: :class:`RowwiseParallel` of this module, because per-channel scales
are not sharded along K. Where every rank has loaded the weights, ``parallelize_module(...,
src_data_rank=None)`` shards without communication; gloo needs that, for it sends no float8.

What differs from one device: a row shard sees part of a token, so its activations are quantised
with that part's own largest value, which is at least as accurate. Partial sums are rounded to the
output's dtype, added by the all-reduce, and then comes the bias, as in torch.

MXFP8 scales of a shard are laid out at every call, which is one launch more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, parallel
from torch.nn import Parameter

from cute_fp8.api import gemm
from cute_fp8.models.linear import SCALE, Linear, out_dtype_of, size_refusal
from cute_fp8.producers import quantize_input


class RowwiseParallel(parallel.RowwiseParallel):
    """torch's ``RowwiseParallel`` for :class:`cute_fp8.Linear`: K is sharded.

    Per-channel scales are replicated, MXFP8 scales sharded along K as the codes are; the bias is
    added once, after the reduction. Other modules are left to torch's own style.
    """

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if not isinstance(module, Linear):
            super()._partition_linear_fn(name, module, device_mesh)  # type: ignore[no-untyped-call]
            return
        shards = device_mesh.size()
        k = module.in_features
        refusal = size_refusal(module.out_features, k // shards, module.variant)
        if k % shards or refusal is not None:
            raise ValueError(
                f"{name or 'module'}: got K = {k} on {shards} devices, must divide: "
                f"{refusal or 'uneven shards'}"
            )
        if SCALE not in dict(module.named_parameters(recurse=False)):
            raise ValueError(
                f"{name or 'module'}: got a layer of a decoder block, must be converted with "
                "fuse=False"
            )
        whole = (Replicate(),)
        along_k = (Shard(1),)
        placements = {
            "weight": along_k,
            SCALE: along_k if module.variant == "mxfp8" else whole,
            "bias": whole,
        }
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                key, _distributed(parameter, device_mesh, placements[key], self.src_data_rank)
            )

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, mesh: Any
    ) -> Any:
        if outputs.placements != output_layouts:
            outputs = outputs.redistribute(placements=output_layouts)
        if isinstance(mod, Linear) and mod.bias is not None:
            bias: Any = mod.bias.to(outputs.dtype)
            if outputs.placements[0] in (Shard(-1), Shard(outputs.ndim - 1)):
                bias = bias.redistribute(placements=[Shard(0)])
            outputs = outputs + bias
        return outputs.to_local() if use_local_output else outputs


def _distributed(
    parameter: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], source: int | None
) -> Parameter:
    """A shard. Collectives know no float8, on gloo at least, so it travels as bytes."""
    tensor = parameter.detach()
    if tensor.element_size() == 1:
        shared: Any = distribute_tensor(
            tensor.view(torch.uint8), mesh, placements, src_data_rank=source
        )
        local = shared.to_local().view(tensor.dtype)
        shape, stride = tensor.shape, tensor.stride()
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    else:
        tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=source)
    return Parameter(tensor, requires_grad=False)


def forward(module: Linear, x: Tensor) -> Tensor:
    """The forward of a layer whose parameters are DTensors: local shards in, a DTensor out.

    Raises:
        TypeError: x is no DTensor, or placed as neither style places it.
    """
    weight, scale, bias = module.weight, module.weight_scale, module.bias
    if not (isinstance(x, DTensor) and isinstance(weight, DTensor) and isinstance(scale, DTensor)):
        raise TypeError(
            f"x: got {type(x).__name__}, must be a DTensor, as parallel styles make it, "
            "where weight and scales are"
        )
    (placed,) = weight.placements
    by_rows = placed == Shard(1)
    wanted = Shard(x.ndim - 1) if by_rows else Replicate()
    (have,) = x.placements
    if not (have == wanted or (by_rows and have == Shard(-1))):
        raise TypeError(f"x: got placement {have}, must be {wanted}")
    local = x.to_local()
    xq, sx = quantize_input(local, module.variant)
    y = gemm(
        xq,
        sx,
        weight.to_local(),
        scale.to_local(),
        bias.to_local() if isinstance(bias, DTensor) and not by_rows else None,
        out_dtype=out_dtype_of(local),
        fast_accum=module.fast_accum,
    )
    assert isinstance(y, torch.Tensor)
    placement = Partial() if by_rows else Shard(y.ndim - 1)
    return DTensor.from_local(y, weight.device_mesh, [placement], run_check=False)
