"""What a model's own config says of its FP8 layers, so that whoever saves it says it too.

``save_pretrained`` of transformers and of diffusers writes the state dict as it is beside the
config. Without a ``quantization_config`` in there ``from_pretrained`` would take FP8 codes for
weights.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cute_fp8.models.formats import MXFP8_STATE, quantization_config
from cute_fp8.models.fusing import Part
from cute_fp8.models.linear import Linear
from cute_fp8.models.places import linear_places


def said_of(model: nn.Module) -> dict[str, Any] | None:
    """The ``quantization_config`` of a folder that :func:`~cute_fp8.save_checkpoint` writes; None
    of a model without FP8 layers.
    """
    variants: dict[str, str] = {}
    ignore = []
    for name, module in linear_places(model).items():
        layer = module.whole if isinstance(module, Part) else module
        if isinstance(layer, Linear):
            variants[name] = layer.variant
        else:
            ignore.append(name)
    return quantization_config(variants, ignore) if variants else None


def tell_config(model: nn.Module) -> tuple[str, ...]:
    """Put it into the config of a model of transformers or diffusers; what else changes, as notes.

    A state dict has MXFP8 scales as float8_e8m0fnu, which loaders that expect bytes would convert
    as numbers. So there the format has a name of its own, which others refuse.
    """
    config: Any = getattr(model, "config", None)
    said = said_of(model)
    register = getattr(model, "register_to_config", None)
    if said is None or not (callable(register) or hasattr(config, "to_json_string")):
        return ()
    for group in said["config_groups"].values():
        if group["format"] == "mxfp8-quantized":
            group["format"] = said["format"] = MXFP8_STATE
    if callable(register):
        register(quantization_config=said)
    else:
        config.quantization_config = said
    dtype = getattr(model, "dtype", None)
    if getattr(dtype, "itemsize", 2) > 1:
        return ()
    return (f"model.dtype is {dtype} now, for that is its first parameter's",)
