"""A decoder layer as a module, and how it is made from one of transformers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cute_fp8.decoder.block import decoder_block
from cute_fp8.decoder.kv_cache import KVCache
from cute_fp8.decoder.weights import DecoderConfig, DecoderWeights, Projection, gated, project
from cute_fp8.models.fusing import Part, joined
from cute_fp8.models.linear import Linear

#: Classes of transformers that are known to compute what a decoder block does.
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


class DecoderBlock(nn.Module):
    """A pre-norm decoder layer with FP8 weights; see :func:`cute_fp8.decoder_block`.

    Its tensors are buffers, whose dtypes ``to`` leaves as they are. It takes the place of the layer
    that it was made from: a model calls it with the same arguments.
    """

    def __init__(self, weights: DecoderWeights, layer: int = 0):
        """``layer``: the number that a cache of transformers knows it by.

        Raises:
            TypeError: weights are no :class:`DecoderWeights`.
        """
        super().__init__()
        if not isinstance(weights, DecoderWeights):
            got = type(weights).__name__  # type: ignore[unreachable]
            raise TypeError(f"weights: got {got}, must be DecoderWeights (from_module makes them)")
        self.config = weights.check().config
        self.layer = layer
        for name, tensor in weights.tensors():
            self.register_buffer(name, tensor.detach())
        self._weights: DecoderWeights | None = None
        self._buffers_then: tuple[Tensor | None, ...] = ()

    @classmethod
    def from_module(
        cls, layer: Any, *, variant: str | None = None, causal: bool = True
    ) -> DecoderBlock:
        """Make a block of a Llama, Mistral, Qwen2 or Qwen3 decoder layer of transformers.

        Args:
            layer: with bf16, fp16 or fp32 weights, which are quantised; or with every projection a
                :class:`cute_fp8.Linear`, as ``convert`` and ``load_checkpoint`` make them, whose
                codes and scales are put together as they are.
            variant: ``per_token`` or ``mxfp8``; by default what the projections are, else
                ``per_token``.
            causal: False attends in both directions where no mask is given.

        Raises:
            TypeError: another layer, or a projection that is no linear layer.
            ValueError: something in it that is not supported, with the reason.
        """
        if not any(is_a(layer, name) for name in LAYERS):
            name = type(layer).__name__
            raise TypeError(f"layer: got {name}, must be one of {', '.join(LAYERS)}")
        config = layer_config(layer, variant, causal)
        return cls(_weights(layer, config), layer=int(layer.self_attn.layer_idx or 0))

    @property
    def weights(self) -> DecoderWeights:
        """Its tensors, by name; checked where one is another than at the last call."""
        found = tuple(self._buffers.values())
        if self._weights is None or any(
            new is not old for new, old in zip(found, self._buffers_then, strict=True)
        ):
            self._weights = DecoderWeights.of(self.config, dict(self.named_buffers()))
            self._buffers_then = found
        return self._weights

    def make_cache(self, batch: int, capacity: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
        """An empty cache on the block's device, of ``batch`` sequences of ``capacity`` tokens.

        Args:
            dtype: that of the activations.
        """
        return KVCache.empty(batch, self.config.columns, capacity, dtype, self.weights.device)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As transformers' layers have it; ``position_ids`` are in the embeddings already."""
        if cache is None:
            cache = kwargs.get("past_key_values")
        y: Tensor = decoder_block(
            hidden_states,
            self.weights,
            position_embeddings,  # type: ignore[arg-type]
            cache,
            attention_mask=attention_mask,
            layer=self.layer,
        )
        return y

    def _apply(self, fn: Any, recurse: bool = True) -> DecoderBlock:
        """Moves, but converts nothing: a dtype is part of what a code or scale means."""

        def moved(tensor: Tensor) -> Tensor:
            found: Tensor = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        self._weights = None
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        """Refuses what a copy would round to codes or scales."""
        *_, error_msgs = arguments
        for name, buffer in self.named_buffers(recurse=False):
            found = state_dict.get(prefix + name, buffer)
            if name.endswith(("_codes", "_scales")) and found.dtype is not buffer.dtype:
                error_msgs.append(
                    f"{prefix}{name}: got {found.dtype}, must be {buffer.dtype} "
                    "(from_module quantises)"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)
        self._weights = None

    def extra_repr(self) -> str:
        """Its shape."""
        c = self.config
        return (
            f"hidden={c.hidden}, ffn={c.ffn}, heads={c.heads}/{c.kv_heads}x{c.head_dim}, "
            f"variant={c.variant}, causal={c.causal}"
        )


# ------------------------------------------------------------------------------- from transformers


def layer_config(
    layer: Any, variant: str | None, causal: bool, masked: bool = False
) -> DecoderConfig:
    """The shape of a layer of :data:`LAYERS`.

    Args:
        variant: that it shall have; None for what it has.
        masked: whether its calls come with the masks of sliding windows.

    Raises:
        TypeError, ValueError: the reason why it is not supported.
    """
    attention, mlp, hf = layer.self_attn, layer.mlp, layer.self_attn.config
    if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        raise ValueError(f"layer: got {type(mlp).__name__}, must have a gated MLP (no experts)")
    if hf.hidden_act not in ("silu", "swish"):
        raise ValueError(f"layer: got activation {hf.hidden_act!r}, must be 'silu'")
    mistral = is_a(layer, "MistralDecoderLayer")
    window = getattr(hf if mistral else attention, "sliding_window", None)
    if window is not None and not masked:
        raise ValueError(f"layer: got a sliding window of {window}, must attend to all tokens")
    dim = attention.head_dim
    if abs(attention.scaling - dim**-0.5) > 1e-9:
        raise ValueError(f"layer: got attention scaling {attention.scaling}, must be {dim**-0.5}")
    epsilons = {n.variance_epsilon for n in norms_of(layer).values()}
    if len(epsilons) != 1:
        raise ValueError(f"layer: got norms with epsilons {sorted(epsilons)}, must be one for all")
    variant = _variant(linears_of(layer), variant)
    return DecoderConfig(
        hidden=attention.q_proj.in_features,
        ffn=mlp.gate_proj.out_features,
        heads=attention.q_proj.out_features // dim,
        kv_heads=attention.k_proj.out_features // dim,
        head_dim=dim,
        eps=epsilons.pop(),
        causal=causal,
        variant=variant,
    ).check()


def is_a(layer: Any, name: str) -> bool:
    """Whether a layer's class, or one that it comes from, has a name."""
    return any(kind.__name__ == name for kind in type(layer).__mro__)


def _variant(linears: dict[str, Any], wanted: str | None) -> str:
    """That of all projections; ``wanted``, or the usual one, if none is in FP8 yet."""
    kinds: dict[str | None, str] = {}
    for name, linear in linears.items():
        if type(linear) is not nn.Linear and not isinstance(linear, (Linear, Part)):
            raise TypeError(f"{name}: got {type(linear).__name__}, must be nn.Linear")
        own = linear.whole if isinstance(linear, Part) else linear
        kinds.setdefault(own.variant if isinstance(own, Linear) else None, name)
    if len(kinds) > 1:
        got = ", ".join(f"{name} in {kind or 'no FP8'}" for kind, name in kinds.items())
        raise ValueError(f"layer: got {got}, must be all projections of one kind")
    (kind,) = kinds
    if kind is None:
        return wanted or "per_token"
    if wanted not in (None, kind):
        raise ValueError(f"variant: got {wanted!r}, must be {kind!r} as the projections are")
    return kind


def norms_of(layer: Any) -> dict[str, Any]:
    """The norms of a layer, by :class:`DecoderWeights`' names."""
    found = {
        "input_norm": layer.input_layernorm,
        "mlp_norm": layer.post_attention_layernorm,
        "q_norm": getattr(layer.self_attn, "q_norm", None),
        "k_norm": getattr(layer.self_attn, "k_norm", None),
    }
    return {name: norm for name, norm in found.items() if norm is not None}


def linears_of(layer: Any) -> dict[str, Any]:
    """The projections of a layer, by transformers' names."""
    attention, mlp = layer.self_attn, layer.mlp
    found = {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    return found | {name: getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}


@torch.no_grad()
def _weights(layer: Any, config: DecoderConfig) -> DecoderWeights:
    linears, variant = linears_of(layer), config.variant
    norms: dict[str, Tensor] = {n: p.weight.detach().clone() for n, p in norms_of(layer).items()}
    projections: dict[str, Projection] = {
        "qkv": _projection([linears[name] for name in ("q_proj", "k_proj", "v_proj")], variant),
        "o": _projection([linears["o_proj"]], variant),
        "gate_up": _projection(
            [linears["gate_proj"], linears["up_proj"]], variant, interleaved=True
        ),
        "down": _projection([linears["down_proj"]], variant),
    }
    return DecoderWeights(config, **norms, **projections).check()  # type: ignore[arg-type]


def _projection(layers: list[Any], variant: str, *, interleaved: bool = False) -> Projection:
    """One projection of some: rows one after another, or gate and up interleaved."""
    if isinstance(layers[0], Part):
        return of_linear(layers[0].whole)
    biases = [layer.bias for layer in layers]
    if len({bias is None for bias in biases}) != 1:
        names = "gate and up" if interleaved else "q, k and v"
        raise ValueError(f"layer: got biases on some of {names}, must be on all or none")
    if isinstance(layers[0], Linear):
        return of_linear(joined(layers, interleaved) if len(layers) > 1 else layers[0])
    if interleaved:
        gate, up = ((layer.weight, layer.bias) for layer in layers)
        return gated(gate, up, variant)
    bias = None if biases[0] is None else torch.cat(biases)
    return project(torch.cat([layer.weight for layer in layers]), bias, variant)


def of_linear(layer: Linear) -> Projection:
    """The tensors of a layer that is in FP8, none of them copied."""
    return Projection(layer.weight, layer.gemm_scale.view(-1), layer.bias)
