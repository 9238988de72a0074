"""Models with FP8 layers to and from folders of safetensors.

What is written is what compressed-tensors calls ``float-quantized`` (MXFP8: ``mxfp8-quantized``),
with the ``quantization_config`` that says so. What is read is that, and the other forms of
:mod:`cute_fp8.models.formats`. No pickle is ever written or read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from cute_fp8.gemms.problem import E8M0
from cute_fp8.models.formats import BLOCK, MXFP8_STATE, SCALES, UNUSED, Found, recognise, take
from cute_fp8.models.fusing import Fuse, Part, check_fuse
from cute_fp8.models.fusing import fuse as fuse_layers
from cute_fp8.models.linear import Linear, check_variant
from cute_fp8.models.model_config import said_of, tell_config
from cute_fp8.models.places import linear_places, refusal, replace
from cute_fp8.models.report import LayerReport, Report
from cute_fp8.models.tensor_files import (
    CONFIG,
    INDEX,
    SINGLE,
    TensorFolder,
    index_of,
    read_json,
    write_json,
    write_tensors,
)
from cute_fp8.progress import watched

#: Formats of compressed-tensors that are read.
FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized", "mixed-precision", "dense")
#: Those, and what ``save_pretrained`` writes of MXFP8 layers.
_READ = (*FORMATS, MXFP8_STATE)
#: Bytes of a file, about.
SHARD_BYTES = 5_000_000_000


def save_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write a model's state dict, and its config with what was quantised how.

    Args:
        model: fused or not, which makes no difference to the files.
        folder: made if need be. Files of the same names are replaced.
        shard_bytes: a file holds about so many.

    Returns:
        The files of tensors.

    Raises:
        ValueError: the folder has safetensors files that would not be replaced.
        RuntimeError: the model has tensors on the meta device.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = _own_tensors(model)
    shards = _shards(tensors, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else []
    names = names or [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    others = sorted({file.name for file in path.glob("*.safetensors")} - set(names))
    if others:
        raise ValueError(f"folder: got one with {others[0]} in it, must have no other safetensors")
    files: dict[str, str] = {}
    for file, keys in watched(list(zip(names, shards, strict=True)), "saving", len(shards)):
        write_tensors(path / file, {key: as_stored(tensors[key]) for key in keys})
        files |= dict.fromkeys(keys, file)
    if len(shards) > 1:
        write_json(path / INDEX, index_of(files, sum(t.nbytes for t in tensors.values())))
    else:
        (path / INDEX).unlink(missing_ok=True)
    _write_config(model, path / CONFIG)
    return [path / name for name in names]


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, with every tensor under the first of its names only."""
    seen: dict[tuple[Any, ...], str] = {}
    kept: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "meta":
            raise RuntimeError(f"{name}: got a tensor on the meta device, must have values")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and seen.setdefault(key, name) != name:
            continue
        kept[name] = tensor
    return kept


def _shards(tensors: dict[str, Tensor], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def as_stored(tensor: Tensor) -> Tensor:
    """On the CPU, in memory of its own; e8m0 as bytes, as compressed-tensors has it."""
    tensor = tensor.detach()
    tensor = tensor.view(torch.uint8) if tensor.dtype is E8M0 else tensor
    if tensor.element_size() == 1 and tensor.is_floating_point():
        return tensor.view(torch.uint8).cpu().contiguous().clone().view(tensor.dtype)
    return tensor.cpu().contiguous().clone()


def _write_config(model: nn.Module, path: Path) -> None:
    config: dict[str, Any] = read_json(path) if path.is_file() else {}
    own: Any = getattr(model, "config", None)
    if hasattr(own, "to_json_string"):
        config = json.loads(own.to_json_string(use_diff=False))
    config.pop("quantization_config", None)
    if (said := said_of(model)) is not None:
        config["quantization_config"] = said
    if config:
        write_json(path, config)


# ---------------------------------------------------------------------------------------- reading


def load_checkpoint(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    variant: str | None = None,
    fuse: Fuse = True,
) -> Report:
    """Load a folder's tensors; where a linear layer's weight is FP8, put a :class:`Linear` there.

    Names, shapes and dtypes are checked before anything is changed.

    Args:
        model: made from the checkpoint's config, with ``nn.Linear`` or :class:`Linear` inside; on
            the meta device, too, in which case the tensors come to lie on the CPU.
        folder: with one or several safetensors files.
        variant: to have the FP8 layers in, if not in the checkpoint's: ``per_token`` or ``mxfp8``.
            128x128 blocks are quantised again, ``per_token`` unless it is said otherwise.
        fuse: as in :func:`cute_fp8.convert`.

    Returns:
        A report of the linear layers; ``weight_rel_l2`` and a note where one was quantised again.

    Raises:
        TypeError, ValueError: a tensor that is missing, that nothing takes, or that has the wrong
            shape or dtype, by its name; FP8 codes for a layer that must stay what it is; a buffer
            that would be left on the meta device; or a checkpoint in a format that is not read.
    """
    if variant is not None:
        check_variant(variant)
    check_fuse(fuse)
    with TensorFolder(folder) as files:
        block = block_of(files.config)
        found: dict[str, Found] = {}
        for name in linear_places(model):
            if (form := recognise(name, files.facts, block)) is not None:
                found[name] = form
        _check(model, files, found)
        _check_places(model, found)
        layers = []
        places = linear_places(model)
        for name in watched(list(places), "loading", len(places)):
            layers.append(_load_linear(model, name, places.pop(name), files, found, variant, block))
        _load_others(model, files, set(found))
    fused = fuse_layers(model, fuse)
    return Report.of(layers, fused, (*_notes(files, found), *tell_config(model)))


def block_of(config: dict[str, Any]) -> tuple[int, int]:
    """The size of blocks that a config speaks of.

    Raises:
        ValueError: a quantisation that is not read here.
    """
    said = config.get("quantization_config") or {}
    method, form = said.get("quant_method"), said.get("format")
    if method not in (None, "compressed-tensors", "fp8"):
        raise ValueError(
            f"{CONFIG}: got quant_method {method!r}, must be 'compressed-tensors' or 'fp8'"
        )
    if method == "compressed-tensors" and form not in (None, *_READ):
        raise ValueError(f"{CONFIG}: got format {form!r}, must be one of {', '.join(FORMATS)}")
    rows, columns = said.get("weight_block_size") or BLOCK
    for group in (said.get("config_groups") or {}).values():
        structure = (group.get("weights") or {}).get("block_structure")
        if isinstance(structure, list):
            rows, columns = structure
    return int(rows), int(columns)


def _check(model: nn.Module, files: TensorFolder, found: dict[str, Found]) -> None:
    """Everything that headers tell, before anything is changed."""
    taken: set[str] = set()
    loaded: set[int] = set()
    missing: dict[str, int] = {}
    state = model.state_dict(keep_vars=True)
    for key, tensor in state.items():
        layer, _, last = key.rpartition(".")
        if layer in found and last in SCALES:
            continue
        facts = files.facts(key)
        if facts is None:
            missing[key] = id(tensor)
            continue
        loaded.add(id(tensor))
        taken.add(key)
        if facts.shape != tuple(tensor.shape):
            raise ValueError(f"{key}: got shape {facts.shape}, must be {tuple(tensor.shape)}")
        is_fp8 = facts.dtype.is_floating_point and facts.dtype.itemsize == 1
        if is_fp8 and not (layer in found and last == "weight"):
            raise TypeError(f"{key}: got {facts.dtype}, must be the weight of a linear layer")
        if last == "weight" and layer not in found and tensor.dtype.itemsize == 1:
            raise TypeError(
                f"{key}: got {facts.dtype}, must be torch.float8_e4m3fn as in the model "
                "(load first, then convert)"
            )
    absent = [key for key, tensor in missing.items() if tensor not in loaded]
    if absent:
        raise ValueError(f"{absent[0]}: got no such tensor, must be there{_more(absent)}")
    taken |= {f"{name}.{scale}" for name in found for scale in SCALES}
    extra = [key for key in files.files if key not in taken and not key.endswith(UNUSED)]
    if extra:
        raise ValueError(f"{extra[0]}: got a tensor that the model has no place for{_more(extra)}")


def _check_places(model: nn.Module, found: Iterable[str]) -> None:
    """That a layer can be put where the checkpoint has one, and nothing stays without values."""
    for name in found:
        if (reason := refusal(model, name)) is not None:
            raise ValueError(f"{name}: got FP8 codes, must be in bf16: {reason}")
    replaced = set(found)
    loaded = set(model.state_dict(keep_vars=True))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [
        name
        for name, tensor in tensors
        if tensor.device.type == "meta"
        and name not in loaded
        and name.rpartition(".")[0] not in replaced
    ]
    if left:
        raise ValueError(
            f"{left[0]}: got no values, for it is on the meta device and in no checkpoint"
            f"{_more(left)}: make the model's buffers on a real device"
        )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _load_linear(
    model: nn.Module,
    name: str,
    module: nn.Module,
    files: TensorFolder,
    found: dict[str, Found],
    variant: str | None,
    block: tuple[int, int],
) -> LayerReport:
    """One layer: replaced if it is FP8; any other is loaded with the rest."""
    own = module.whole if isinstance(module, Part) else module
    assert isinstance(own, nn.Linear)
    if name not in found:
        (n, k), size = own.weight.shape, own.weight.nbytes
        return LayerReport(name, n, k, size, size, reason="not quantised in the checkpoint")
    codes, scale, said = take(name, found[name], files.get, variant, block)
    (n, k), bias = codes.shape, None
    device = torch.device("cpu") if own.weight.device.type == "meta" else own.weight.device
    if own.bias is not None:
        bias = files.get(f"{name}.bias").to(own.bias.dtype)
    layer = Linear.from_quantized(codes, scale, bias).to(device)
    if isinstance(module, Part):
        module.load_state_dict(layer.state_dict())
    else:
        replace(model, name, layer.train(own.training))
    before = n * k + files.get(found[name].scale).nbytes
    return LayerReport(name, n, k, before, layer.weight_bytes, **said)


@torch.no_grad()
def _load_others(model: nn.Module, files: TensorFolder, quantised: set[str]) -> None:
    """Everything that is no FP8 layer's; tied parameters are loaded once."""
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key.rpartition(".")[0] in quantised or key not in files.files:
            continue
        value = files.get(key)
        if tensor.device.type != "meta":
            tensor.detach().copy_(value)
            continue
        owner = model.get_submodule(key.rpartition(".")[0])
        last = key.rpartition(".")[2]
        value = value.to(tensor.dtype)
        if isinstance(tensor, Parameter):
            _put(model, tensor, Parameter(value, tensor.requires_grad))
        else:
            owner._buffers[last] = value


def _put(model: nn.Module, old: Parameter, new: Parameter) -> None:
    """In every place where the old one is."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def _notes(files: TensorFolder, found: Iterable[str]) -> tuple[str, ...]:
    static = [key for key in files.files if key.endswith("input_scale")]
    if not static:
        return ()
    return (
        f"{len(static)} scales of static activations are not used: activations are quantised by "
        "their own values",
    )
