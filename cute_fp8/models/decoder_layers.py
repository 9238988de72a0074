"""Decoder layers of transformers run as decoder blocks, each in its place.

A layer stays the module that it was, with the same children and so the same state dict. Its class
becomes a subclass whose ``forward`` calls :func:`cute_fp8.decoder_block` on the children's tensors,
of which none is copied. A call that asks for something else than a block computes, such as
attention by another implementation than torch's ``scaled_dot_product_attention``, runs the forward
that the layer had.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from cute_fp8.arguments import watched
from cute_fp8.decoder.block import decoder_block
from cute_fp8.decoder.module import LAYERS, layer_config, linears_of, norms_of, of_linear
from cute_fp8.decoder.weights import DecoderConfig, DecoderWeights
from cute_fp8.models.fusing import Part, is_hooked, is_known
from cute_fp8.models.linear import Linear, out_dtype_of

#: What a call can ask of attention that a block does not do.
_ELSEWHERE = ("output_attentions", "is_causal", "position_bias", "softcap")


def as_blocks(model: nn.Module) -> tuple[list[str], list[tuple[str, str]]]:
    """Make blocks of the decoder layers whose projections are fused, in place.

    Returns:
        The names of those, and the names of the others, each with the reason.
    """
    made: list[str] = []
    refused: list[tuple[str, str]] = []
    for name, layer in model.named_modules():
        if not is_known(layer, "DecoderLayer"):
            continue
        if (reason := _make(layer)) is None:
            made.append(name)
        else:
            refused.append((name, reason))
    return made, refused


def _make(layer: Any) -> str | None:
    """Make it a block, or say why it cannot be one."""
    if type(layer).__name__ not in LAYERS:
        return f"no block computes what a {type(layer).__name__} does"
    linears = linears_of(layer)
    for name, linear in linears.items():
        if not isinstance(linear, (Linear, Part)):
            return f"its {name} is not in FP8"
    if any(is_hooked(module) for module in layer.modules()):
        return "has forward hooks inside, which would not be called"
    try:
        layer.block_config = layer_config(layer, None, causal=True, masked=True)
        if not hasattr(layer.self_attn, "qkv_proj") or not hasattr(layer.mlp, "gate_up_proj"):
            return "its projections cannot be fused"
        _weights(layer).check()
    except (TypeError, ValueError) as error:
        return str(error).removeprefix("layer: ")
    if len({norm.weight.dtype for norm in norms_of(layer).values()}) > 1:
        return "its norms have several dtypes"
    for linear in (*linears.values(), layer.self_attn.qkv_proj, layer.mlp.gate_up_proj):
        if isinstance(linear, Linear):
            linear.keep_blocks()
    layer.__class__ = _class_of(type(layer))
    return None


def _weights(layer: Any) -> DecoderWeights:
    """The children's tensors."""
    qkv, o, gate_up, down = (of_linear(linear) for linear in _gemms_of(layer))
    norms = {name: norm.weight for name, norm in norms_of(layer).items()}
    return DecoderWeights(layer.block_config, qkv=qkv, o=o, gate_up=gate_up, down=down, **norms)


class _Kept(NamedTuple):
    """A layer's weights, and where everything in them was found: a look at each of these is much
    quicker than to ask the modules again, and whoever changes one is heard.
    """

    weights: DecoderWeights
    linears: tuple[Linear, ...]
    found: tuple[tuple[dict[str, Any], str, Any], ...]
    #: Scales, and what they are views of.
    views: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, layer: Any) -> _Kept:
        """What a layer has now."""
        weights, linears = _weights(layer), _gemms_of(layer)
        leaves = [*linears, *norms_of(layer).values()]
        owners = [module._modules for module in (layer, layer.self_attn, layer.mlp)]
        owners += [d for leaf in leaves for d in (leaf._parameters, leaf._buffers)]
        projections = (weights.qkv, weights.o, weights.gate_up, weights.down)
        views = tuple(
            (
                projection.scales,
                linear.weight_scale if linear.scale_blocks is None else linear.scale_blocks,
            )
            for projection, linear in zip(projections, linears, strict=True)
        )
        return cls(weights, linears, tuple((d, k, v) for d in owners for k, v in d.items()), views)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        for owner, name, value in self.found:
            if owner.get(name) is not value:
                return False
        return all(view.data_ptr() == base.data_ptr() for view, base in self.views)


def _precise_weights(layer: Any) -> DecoderWeights | None:
    """A layer's weights; None if it is to add up fast, which a block does not."""
    if watched():
        weights, linears = _weights(layer), _gemms_of(layer)
    else:
        kept: _Kept | None = layer.__dict__.get("_kept")
        if kept is None or not kept.holds():
            kept = layer.__dict__["_kept"] = _Kept.of(layer)
        weights, linears = kept.weights, kept.linears
    return None if any(linear.fast_accum for linear in linears) else weights


class _AsBlock(nn.Module):
    """What comes before a layer's class, to answer its calls."""

    block_config: DecoderConfig

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' layers have it; releases differ in what they call the cache."""
        cache = kwargs.pop("past_key_values", cache)
        weights = None
        if _computes(self, hidden_states, attention_mask, position_embeddings, kwargs):
            weights = _precise_weights(self)
        if weights is None:
            rest: Any = {"position_embeddings": position_embeddings, **kwargs}
            return super().forward(
                hidden_states, attention_mask, position_ids, cache, use_cache, **rest
            )
        attention: Any = self.self_attn
        return decoder_block(
            hidden_states,
            weights,
            position_embeddings,  # type: ignore[arg-type]
            cache,
            attention_mask=attention_mask,
            layer=attention.layer_idx,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> _AsBlock:
        self.__dict__.pop("_kept", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is copied and pickled: a class made here has no name to be found by."""
        state = {key: value for key, value in self.__dict__.items() if key != "_kept"}
        return _empty, (type(self).__bases__[1],), state


def _computes(layer: Any, x: Tensor, mask: Any, embeddings: Any, options: dict[str, Any]) -> bool:
    """Whether a block computes what a call of the layer asks for."""
    attention = layer.self_attn
    return (
        embeddings is not None
        and attention.config._attn_implementation == "sdpa"
        and x.dtype == layer.input_layernorm.weight.dtype == embeddings[0].dtype
        and (mask is None or (isinstance(mask, Tensor) and mask.dim() == 4))
        and not (layer.training and attention.attention_dropout)
        and out_dtype_of(x) is x.dtype
        and not any(options.get(name) is not None for name in _ELSEWHERE)
    )


def _gemms_of(layer: Any) -> tuple[Linear, ...]:
    """Its projections, fused, in the order of :class:`DecoderWeights`."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _class_of(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a layer's class that is a block, one for each."""
    if base not in _classes:
        name = f"Block{base.__name__}"
        about = {"__doc__": f"A {base.__name__} that is a decoder block.", "__module__": __name__}
        _classes[base] = type(name, (_AsBlock, base), about)
    return _classes[base]


def _empty(base: type[nn.Module]) -> nn.Module:
    kind = _class_of(base)
    return kind.__new__(kind)
