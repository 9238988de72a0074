"""The forms in which published checkpoints hold FP8 weights, and what becomes of them here.

| scales beside the codes                        | written as            | here             |
|---|---|---|
| ``weight_scale`` ``[N, 1]`` or ``[N]``, float  | per channel           | as they are      |
| ``weight_scale`` of one element                | per tensor            | for each channel |
| ``weight_scale`` uint8 or e8m0 ``[N, K/32]``   | MXFP8                 | as they are      |
| ``weight_scale_inv`` ``[N/128, K/128]``        | 128x128 blocks        | quantised again  |

``weight_scale_inv`` is, its name notwithstanding, what codes are multiplied with. Block scales that
are powers of two become MXFP8 without any error. Scales of static activations and of KV caches are
not used: activations are quantised by their own values at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_fp8.gemms.problem import E4M3, E8M0
from cute_fp8.models.linear import SCALE, check_size
from cute_fp8.models.weights import module_scale, quantize_weight
from cute_fp8.numerics import MX_BLOCK, dequantize_fp8, dequantize_mxfp8

SCALE_INV = "weight_scale_inv"
SCALES = (SCALE, SCALE_INV)
#: Last parts of names of tensors that nothing here needs.
UNUSED = (
    *("input_scale", "output_scale", "q_scale", "k_scale", "v_scale"),
    *("rotary_emb.inv_freq", "position_ids"),
)
#: Rows and columns of a block, unless a checkpoint's config says otherwise.
BLOCK = (128, 128)
#: The format of MXFP8 in a state dict, whose scales are float8_e8m0fnu and not bytes: our name.
MXFP8_STATE = "mxfp8-e8m0"
_OTHER_FP8 = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Weight elements that are dequantised at a time.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Facts:
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Found:
    """How a layer's weight lies in a checkpoint.

    Attributes:
        kind: ``channel``, ``tensor``, ``mxfp8`` or ``block``.
        scale: the name of its scales.
        variant: of :class:`cute_fp8.Linear` that takes it as it is; None for blocks.
    """

    kind: str
    scale: str

    @property
    def variant(self) -> str | None:
        """``per_token`` or ``mxfp8``."""
        return {"channel": "per_token", "tensor": "per_token", "mxfp8": "mxfp8"}.get(self.kind)


def recognise(
    name: str, facts: Callable[[str], Facts | None], block: tuple[int, int] = BLOCK
) -> Found | None:
    """Which form the layer called ``name`` has; None if its weight is in no FP8.

    Args:
        name: of the layer.
        facts: of a tensor by its name; None if there is none.
        block: rows and columns of a block.

    Raises:
        TypeError: codes or scales of a dtype that is not read here.
        ValueError: no scales, or of a shape that does not belong to the codes.
    """
    weight = facts(f"{name}.weight")
    if weight is None or weight.dtype.itemsize != 1:
        return None
    if weight.dtype is not E4M3:
        raise TypeError(f"{name}.weight: got {weight.dtype}, must be torch.float8_e4m3fn")
    n, k = weight.shape if len(weight.shape) == 2 else (0, 0)
    scales = {f"{name}.{s}": found for s in SCALES if (found := facts(f"{name}.{s}")) is not None}
    if not scales:
        raise ValueError(
            f"{name}.{SCALE}: got no such tensor, must be there (or {SCALE_INV}) beside FP8 codes"
        )
    scale, found = next(iter(scales.items()))
    shape = found.shape
    blocks = tuple(-(-size // part) for size, part in zip((n, k), block, strict=True))
    kind = None
    if found.dtype in (torch.uint8, E8M0) and shape == (n, k // MX_BLOCK):
        kind = "mxfp8"
    elif found.dtype in (*_FLOATS, E8M0):
        if shape in ((n,), (n, 1), (1, n)) and found.dtype in _FLOATS:
            kind = "channel"
        elif torch.Size(shape).numel() == 1:
            kind = "tensor"
        elif shape == blocks:
            kind = "block"
    if kind is None:
        raise ValueError(
            f"{scale}: got {found.dtype} of shape {shape}, must be one element, ({n}, 1), "
            f"({n}, {k // MX_BLOCK}) bytes, or {blocks} for blocks of {block[0]}x{block[1]}"
        )
    return Found(kind, scale)


def other_fp8(dtype: torch.dtype) -> bool:
    """Whether it is an FP8 format that no weight may have here."""
    return dtype in _OTHER_FP8


def take(
    name: str,
    found: Found,
    get: Callable[[str], Tensor],
    variant: str | None,
    block: tuple[int, int] = BLOCK,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Codes and scales of a layer, as :class:`cute_fp8.Linear` has them.

    Args:
        name: of the layer.
        found: what :func:`recognise` says of it.
        get: a tensor by its name.
        variant: to have it in; None for the one that it is in, ``per_token`` for blocks.
        block: rows and columns of a block.

    Returns:
        Codes, scales, and what a :class:`~cute_fp8.models.report.LayerReport` says of them: the
        ``weight_rel_l2`` of quantising again, relative to the checkpoint's own values.

    Raises:
        ValueError: a NaN among codes or scales, or sizes that the variant does not take.
    """
    codes, scale = get(f"{name}.weight"), get(found.scale)
    n, k = codes.shape
    variant = variant or found.variant or "per_token"
    check_size(f"{name}.weight", n, k, variant)
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ValueError(f"{name}.weight: got a NaN among its codes, must be finite")
    scale = scale.view(E8M0) if scale.dtype is torch.uint8 else scale
    scale = scale if found.kind == "mxfp8" else scale.to(torch.float32)
    if not bool(torch.isfinite(scale.to(torch.float32)).all()):
        raise ValueError(f"{found.scale}: got a NaN or Inf, must be finite")
    if found.kind != "block" and variant == found.variant:
        return codes, module_scale(scale, n, k), {"variant": variant}
    return _requantised(codes, scale, found.kind, variant, block)


def _requantised(
    codes: Tensor, scale: Tensor, kind: str, variant: str, block: tuple[int, int]
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Some rows at a time through fp32."""
    n, k = codes.shape
    step = max(1, _CHUNK // k // block[0]) * block[0]
    parts, error, size = [], 0.0, 0.0
    for first in range(0, n, step):
        rows = slice(first, first + step)
        values = _values(codes[rows], scale, kind, block, first)
        quantised = quantize_weight(values, variant)
        back = dequantize_mxfp8 if variant == "mxfp8" else dequantize_fp8
        error += float((back(*quantised, torch.float32) - values).square().sum())
        size += float(values.square().sum())
        parts.append(quantised)
    new = torch.cat([q.view(torch.uint8) for q, _ in parts]).view(E4M3)
    scales = [s for _, s in parts]
    joined = torch.cat([s.view(torch.uint8) for s in scales]).view(scales[0].dtype)
    rel_l2 = (error / size) ** 0.5 if size else 0.0
    form = f"{block[0]}x{block[1]} blocks" if kind == "block" else f"{kind} scales"
    note = f"quantised again from {form}: relative L2 error {rel_l2:.4f} of the weight"
    return new, joined, {"variant": variant, "weight_rel_l2": rel_l2, "notes": (note,)}


def _values(codes: Tensor, scale: Tensor, kind: str, block: tuple[int, int], first: int) -> Tensor:
    """fp32 values of rows from ``first`` on, which is where a block begins."""
    n, k = codes.shape
    if kind == "block":
        blocks = scale[first // block[0] :][: -(-n // block[0])]
        factors = blocks.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
        return codes.to(torch.float32) * factors
    rows = module_scale(scale, first + n, k) if scale.numel() == 1 else scale
    part = rows[first : first + n]
    if kind == "mxfp8":
        return dequantize_mxfp8(codes, part, torch.float32)
    return dequantize_fp8(codes, part.reshape(-1), torch.float32)


def quantization_config(variants: dict[str, str], ignore: list[str]) -> dict[str, Any]:
    """What a ``config.json`` says of FP8 weights, in compressed-tensors' words.

    Args:
        variants: of the quantised layers, by name.
        ignore: names of the linear layers that are not.
    """
    groups: dict[str, Any] = {}
    for variant in sorted(set(variants.values())):
        alone = len(set(variants.values())) == 1
        names = [name for name, of in variants.items() if of == variant]
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        if variant == "mxfp8":
            common |= {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
            inputs = {**common, "dynamic": True}
            weights = {**common, "dynamic": False}
        else:
            weights = {**common, "strategy": "channel", "dynamic": False}
            inputs = {**common, "strategy": "token", "dynamic": True}
        form = "mxfp8-quantized" if variant == "mxfp8" else "float-quantized"
        groups[f"group_{len(groups)}"] = {
            "targets": ["Linear"] if alone else names,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": form,
        }
    forms = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
    }
