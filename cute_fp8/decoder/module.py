"""A decoder layer as a module, and how it is made from one of transformers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cute_fp8.decoder.block import decoder_block
from cute_fp8.decoder.kv_cache import KVCache
from cute_fp8.decoder.weights import DecoderConfig, DecoderWeights, Projection, gated, project

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

    @classmethod
    def from_module(
        cls, layer: Any, *, variant: str = "per_token", causal: bool = True
    ) -> DecoderBlock:
        """Quantise a Llama, Mistral, Qwen2 or Qwen3 decoder layer of transformers.

        Args:
            layer: with bf16, fp16 or fp32 weights.
            variant: ``per_token`` or ``mxfp8``.
            causal: False attends in both directions where no mask is given.

        Raises:
            TypeError: another layer, or a projection that is no ``nn.Linear``.
            ValueError: something in it that is not supported, with the reason.
        """
        name = type(layer).__name__
        if name not in LAYERS:
            raise TypeError(f"layer: got {name}, must be one of {', '.join(LAYERS)}")
        config = _config(layer, variant, causal)
        return cls(_weights(layer, config), layer=int(layer.self_attn.layer_idx or 0))

    @property
    def weights(self) -> DecoderWeights:
        """Its tensors, by name."""
        if self._weights is None:
            self._weights = DecoderWeights.of(self.config, dict(self.named_buffers()))
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


def _config(layer: Any, variant: str, causal: bool) -> DecoderConfig:
    """The shape of a layer, or the reason why it is not supported."""
    attention, mlp, hf = layer.self_attn, layer.mlp, layer.self_attn.config
    if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        raise ValueError(f"layer: got {type(mlp).__name__}, must have a gated MLP (no experts)")
    if hf.hidden_act not in ("silu", "swish"):
        raise ValueError(f"layer: got activation {hf.hidden_act!r}, must be 'silu'")
    mistral = type(layer).__name__ == "MistralDecoderLayer"
    window = getattr(hf if mistral else attention, "sliding_window", None)
    if window is not None:
        raise ValueError(f"layer: got a sliding window of {window}, must attend to all tokens")
    dim = attention.head_dim
    if abs(attention.scaling - dim**-0.5) > 1e-9:
        raise ValueError(f"layer: got attention scaling {attention.scaling}, must be {dim**-0.5}")
    epsilons = {n.variance_epsilon for n in _norms(layer).values()}
    if len(epsilons) != 1:
        raise ValueError(f"layer: got norms with epsilons {sorted(epsilons)}, must be one for all")
    for name, linear in _linears(layer).items():
        if type(linear) is not nn.Linear:
            raise TypeError(f"{name}: got {type(linear).__name__}, must be nn.Linear")
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


def _norms(layer: Any) -> dict[str, Any]:
    found = {
        "input_norm": layer.input_layernorm,
        "mlp_norm": layer.post_attention_layernorm,
        "q_norm": getattr(layer.self_attn, "q_norm", None),
        "k_norm": getattr(layer.self_attn, "k_norm", None),
    }
    return {name: norm for name, norm in found.items() if norm is not None}


def _linears(layer: Any) -> dict[str, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    found = {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    return found | {name: getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}


@torch.no_grad()
def _weights(layer: Any, config: DecoderConfig) -> DecoderWeights:
    attention, mlp, variant = layer.self_attn, layer.mlp, config.variant
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [part.bias for part in parts]
    if len({bias is None for bias in biases}) != 1:
        raise ValueError("layer: got biases on some of q, k and v, must be on all or none")
    bias = None if biases[0] is None else torch.cat(biases)
    qkv = project(torch.cat([part.weight for part in parts]), bias, variant)
    gate, up = ((p.weight, p.bias) for p in (mlp.gate_proj, mlp.up_proj))
    norms: dict[str, Tensor] = {n: p.weight.detach().clone() for n, p in _norms(layer).items()}
    projections: dict[str, Projection] = {
        "qkv": qkv,
        "o": project(attention.o_proj.weight, attention.o_proj.bias, variant),
        "gate_up": gated(gate, up, variant),
        "down": project(mlp.down_proj.weight, mlp.down_proj.bias, variant),
    }
    return DecoderWeights(config, **norms, **projections).check()  # type: ignore[arg-type]
