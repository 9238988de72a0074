"""Projections that read the same input, as one GEMM: q|k|v of attention, gate|up of an MLP.

:func:`fuse` works on models that it knows, the decoders of transformers in :data:`DECODERS`, whose
projections are :class:`cute_fp8.Linear` already. Codes and scales are put together, not made again,
so the numbers of q|k|v do not change at all; of gate|up the product ``act(gate) * up`` is rounded
once, where modules of their own round three times.

A fused model keeps the names and the values of its state dict: in the place of each projection
stays a :class:`Part`, which reads and writes its rows of the fused weight there.

A decoder layer whose projections are all fused can then run as one block
(:mod:`cute_fp8.models.decoder_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cute_fp8.api import gemm_gated
from cute_fp8.gating import GATE_BLOCK, interleave_gate_up
from cute_fp8.gemms.problem import E4M3, GATED_N_MULTIPLE
from cute_fp8.models.linear import SCALE, Linear, out_dtype_of
from cute_fp8.producers import quantize_input

#: Families whose ``<Name>Attention`` passes its input to q, k and v and to nothing else, and whose
#: ``<Name>MLP`` is ``down_proj(act(gate_proj(x)) * up_proj(x))``.
DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma")
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
#: What transformers calls the activations that a gated GEMM has.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_TENSORS = ("weight", SCALE, "bias")


#: How far to fuse: not at all, projections only, or decoder layers as blocks, too.
Fuse = bool | Literal["projections"]


class Fused(NamedTuple):
    """What was fused.

    Attributes:
        projections: names, such as ``model.layers.0.self_attn.q|k|v``.
        blocks: names of decoder layers that run as blocks.
        refused: names of those that do not, each with the reason.
    """

    projections: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


def check_fuse(how: Any) -> None:
    """Raise ``ValueError`` unless it is one of :data:`Fuse`."""
    if not isinstance(how, bool) and how != "projections":
        raise ValueError(f"fuse: got {how!r}, must be True, False or 'projections'")


def fuse(model: nn.Module, how: Fuse = True) -> Fused:
    """Fuse what can be fused, in place."""
    if not how:
        return Fused()
    fused = tuple(_fuse_projections(model))
    if how == "projections":
        return Fused(fused)
    if not any(is_known(module, "DecoderLayer") for module in model.modules()):
        return Fused(fused)
    # Takes the decoder and its ops along.
    from cute_fp8.models.decoder_layers import as_blocks

    blocks, refused = as_blocks(model)
    return Fused(fused, tuple(blocks), tuple(refused))


def _fuse_projections(model: nn.Module) -> list[str]:
    fused = []
    for name, module in list(model.named_modules()):
        if is_known(module, "Attention") and _fusible(module, QKV):
            _fuse_qkv(module)
            fused.append(f"{name}.q|k|v")
    for name, module in list(model.named_modules()):
        for child, mlp in list(module.named_children()):
            known = is_known(mlp, "MLP") and not is_hooked(mlp)
            if known and _fusible(mlp, GATE_UP) and activation_of(mlp) is not None:
                setattr(module, child, GatedMlp(mlp))
                fused.append(f"{name}.{child}.gate|up".removeprefix("."))
    return fused


def is_known(module: nn.Module, kind: str) -> bool:
    """Whether a module is the ``Attention``, ``MLP`` or ``DecoderLayer`` of one of
    :data:`DECODERS`.
    """
    kinds = type(module)
    known = kinds.__name__ in {family + kind for family in DECODERS}
    return known and kinds.__module__.startswith("transformers.")


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody else than we wants to know of its calls, or answers them in its place."""
    before = module._forward_pre_hooks.values()
    others = any(not isinstance(hook, ProjectInput) for hook in before)
    return bool(others or module._forward_hooks or "forward" in module.__dict__)


def activation_of(mlp: nn.Module) -> str | None:
    """The activation of an MLP's gate in our words; None if no gated GEMM has it."""
    config = getattr(mlp, "config", None)
    return ACTIVATIONS.get(str(getattr(config, "hidden_act", None)))


def _fusible(module: nn.Module, names: Sequence[str]) -> bool:
    """All there, quantised by one recipe and on one device, with or without biases together."""
    layers = [getattr(module, name, None) for name in names]
    if not all(type(layer) is Linear for layer in layers):
        return False
    traits = {
        (
            layer.variant,
            layer.in_features,
            layer.weight.device,
            layer.fast_accum,
            None if layer.bias is None else layer.bias.dtype,
        )
        for layer in layers
        if isinstance(layer, Linear)
    }
    channels = [layer.out_features for layer in layers if isinstance(layer, Linear)]
    if names is GATE_UP and (channels[0] != channels[1] or channels[0] % (GATED_N_MULTIPLE // 2)):
        return False
    return len(traits) == 1


class Part(nn.Module):
    """Stands where a projection was whose channels are now rows of a fused one.

    In a state dict it is what it stands for. Called on the fused GEMM's output, it cuts out its
    channels.
    """

    def __init__(self, whole: Linear, first: int, channels: int, gated: int | None = None):
        """Rows ``first`` to ``first + channels``; or, of interleaved ones, gate (0) or up (1)."""
        super().__init__()
        self._whole = (whole,)  # in a tuple: not a child, for it is one of somebody else
        self.first, self.channels, self.gated = first, channels, gated

    @property
    def whole(self) -> Linear:
        """The fused projection."""
        return self._whole[0]

    @property
    def in_features(self) -> int:
        """Of the projection that it stands for."""
        return self.whole.in_features

    @property
    def out_features(self) -> int:
        """Likewise."""
        return self.channels

    def forward(self, y: Tensor) -> Tensor:
        """The channels of this part, of all that the fused GEMM gave."""
        return y[..., self.first : self.first + self.channels]

    def extra_repr(self) -> str:
        """What it stands for."""
        rows = ("gate", "up")[self.gated] if self.gated is not None else f"from {self.first}"
        return f"{self.channels} channels, {rows}"

    def _rows(self, tensor: Tensor) -> Tensor:
        """A view of this part's rows; three-dimensional if they are interleaved."""
        if tensor.element_size() == 1:
            tensor = tensor.view(torch.uint8)
        if self.gated is None:
            return tensor[self.first : self.first + self.channels]
        blocks = tensor.view(-1, 2, GATE_BLOCK, *tensor.shape[1:])
        return blocks[:, self.gated]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in _TENSORS:
            tensor = getattr(self.whole, name)
            if tensor is not None:
                rows = self._rows(tensor.detach()).reshape(self.channels, *tensor.shape[1:])
                destination[prefix + name] = rows.clone().view(tensor.dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """A layer of its own checks what comes, and its rows are written."""
        whole = self.whole
        device = whole.weight.device
        layer = Linear(
            whole.in_features,
            self.channels,
            whole.bias is not None,
            device,
            None if whole.bias is None else whole.bias.dtype,
            variant=whole.variant,
        )
        layer._load_from_state_dict(
            state_dict,
            prefix,
            {},
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if any(key.startswith(prefix) for key in missing_keys) or error_msgs:
            return
        with torch.no_grad():
            for name in _TENSORS:
                tensor, new = getattr(whole, name), getattr(layer, name)
                if tensor is not None:
                    rows = self._rows(tensor.detach())
                    new = new.detach()
                    new = new.view(torch.uint8) if new.element_size() == 1 else new
                    rows.copy_(new.view(rows.shape))
                    if name == SCALE:
                        whole.scales_changed(tensor)


class _Fused(Linear):
    """A fused projection. Its parts stand for it in a state dict."""

    def _save_to_state_dict(self, *arguments: Any) -> None:
        pass

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        pass


def is_whole(module: nn.Module) -> bool:
    """Whether a module is a fused projection, which has no name of its own in a state dict."""
    return isinstance(module, _Fused)


def _joined(tensors: Sequence[Tensor | None], gated: bool) -> Tensor | None:
    """Rows one after another, or gate and up interleaved; bytes, as torch joins no float8."""
    present = [t.detach() for t in tensors if t is not None]
    if not present:
        return None
    dtype = present[0].dtype
    if present[0].element_size() == 1:
        present = [t.view(torch.uint8) for t in present]
    joined = interleave_gate_up(*present) if gated else torch.cat(present)
    return joined.view(dtype)


def joined(layers: Sequence[Linear], gated: bool = False) -> Linear:
    """One layer of several: rows one after another, or gate and up interleaved; no code changes."""
    codes, scale, bias = (
        _joined([getattr(layer, name) for layer in layers], gated) for name in _TENSORS
    )
    assert codes is not None and scale is not None
    whole = _Fused.from_quantized(codes, scale, bias)
    whole.fast_accum = layers[0].fast_accum
    return whole.train(layers[0].training)


class ProjectInput:
    """A pre-hook of attention: its input becomes q|k|v, of which q, k and v are cut out."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See ``nn.Module.register_forward_pre_hook`` with ``with_kwargs=True``."""
        project = module.get_submodule("qkv_proj")
        if args:
            return (project(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": project(kwargs["hidden_states"])}


def _fuse_qkv(attention: nn.Module) -> None:
    layers = [attention.get_submodule(name) for name in QKV]
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    whole = joined(linears)
    first = 0
    for name, layer in zip(QKV, linears, strict=True):
        setattr(attention, name, Part(whole, first, layer.out_features))
        first += layer.out_features
    attention.qkv_proj = whole
    attention.register_forward_pre_hook(ProjectInput(), with_kwargs=True)


class GatedMlp(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))`` with gate and up in one GEMM.

    Between bf16 MXFP8 layers the product leaves the GEMM quantised.
    """

    def __init__(self, mlp: nn.Module):
        """Take the projections of ``mlp``, which is of no use afterwards."""
        super().__init__()
        gate, up = (mlp.get_submodule(name) for name in GATE_UP)
        assert isinstance(gate, Linear) and isinstance(up, Linear)
        activation = activation_of(mlp)
        assert activation is not None
        self.activation = activation
        self.config = getattr(mlp, "config", None)
        whole = joined([gate, up], gated=True)
        self.gate_proj = Part(whole, 0, gate.out_features, gated=0)
        self.up_proj = Part(whole, 0, up.out_features, gated=1)
        self.down_proj = mlp.get_submodule("down_proj")
        self.gate_up_proj = whole
        self.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        whole, down, dtype = self.gate_up_proj, self.down_proj, out_dtype_of(x)
        quantised = (
            dtype is torch.bfloat16
            and whole.variant == "mxfp8"
            and type(down) is Linear
            and down.variant == "mxfp8"
        )
        hidden = gemm_gated(
            *quantize_input(x, whole.variant),
            whole.weight,
            whole.gemm_scale,
            whole.bias,
            activation=self.activation,
            out_dtype=E4M3 if quantised else dtype,
            fast_accum=whole.fast_accum and not quantised,
        )
        if isinstance(hidden, Tensor):
            y: Tensor = down(hidden)
            return y
        assert type(down) is Linear
        return down.forward_quantized(*hidden, dtype)

    def extra_repr(self) -> str:
        """The activation of the gate."""
        return f"activation={self.activation}"
