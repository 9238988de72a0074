"""``nn.Linear`` in FP8: codes and scales as parameters, activations quantised at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from cute_fp8.api import gemm
from cute_fp8.arguments import PLAIN, check_tensor, has_storage
from cute_fp8.capture import is_capturing
from cute_fp8.gemms.problem import E4M3, E8M0, OUT_DTYPES
from cute_fp8.kernels.config import K_MULTIPLE, N_MULTIPLE, VARIANTS
from cute_fp8.models.weights import aligned, module_scale, quantize_weight
from cute_fp8.numerics import MX_BLOCK
from cute_fp8.producers import quantize_input
from cute_fp8.scales import from_blocked, to_blocked

#: The name of the scales beside ``weight``; checkpoints have it too.
SCALE = "weight_scale"


def check_variant(variant: str) -> None:
    """Raise ``ValueError`` unless it is one of :data:`VARIANTS`."""
    if variant not in VARIANTS:
        raise ValueError(f"variant: got {variant!r}, must be one of {', '.join(VARIANTS)}")


def size_refusal(n: int, k: int, variant: str) -> str | None:
    """Why a layer of N output and K input channels cannot be one of these; None if it can."""
    odd = _odd_size(n, k, variant)
    return None if odd is None else "{} = {} is no multiple of {}".format(*odd)


def check_size(argument: str, n: int, k: int, variant: str) -> None:
    """Raise ``ValueError``, naming the argument, if such a layer cannot be one of these."""
    if (odd := _odd_size(n, k, variant)) is not None:
        size, got, multiple = odd
        raise ValueError(
            f"{argument}: got {size} = {got}, must be a positive multiple of {multiple}"
        )


def _odd_size(n: int, k: int, variant: str) -> tuple[str, int, int] | None:
    k_multiple = MX_BLOCK if variant == "mxfp8" else K_MULTIPLE
    for name, size, multiple in (("N", n, N_MULTIPLE), ("K", k, k_multiple)):
        if size == 0 or size % multiple:
            return name, size, multiple
    return None


def out_dtype_of(x: Tensor) -> torch.dtype:
    """The dtype of a layer's output: autocast's where it is on, x's otherwise."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


class Linear(nn.Linear):
    """``nn.Linear`` with an FP8 weight, quantised once, and activations quantised at every call.

    Parameters, none of which ever requires grad:

    * ``weight``: codes ``[N, K]`` float8_e4m3fn;
    * ``weight_scale``: fp32 ``[N, 1]`` (``variant="per_token"``), or float8_e8m0fnu ``[N, K/32]``
      (``"mxfp8"``), row-major, so that every dimension can be sliced;
    * ``bias``: ``[N]`` or None.

    Casts of the module (``.half()``, ``.to(torch.bfloat16)``) leave codes and scales alone. The
    output has the input's dtype, or autocast's where that is on; the input is quantised as it is,
    not rounded to autocast's dtype before. Inference only.

    Attributes:
        variant: ``per_token`` or ``mxfp8``.
        fast_accum: as in :func:`cute_fp8.gemm`.
    """

    weight: Parameter
    #: Bytes of MXFP8 scales in 128x4 blocks, as GEMMs read them; follow ``weight_scale``.
    scale_blocks: Tensor | None
    #: The ``weight_scale`` that the blocks were laid out from, and how it was then.
    _laid_out: tuple[Tensor, tuple[int | None, int]] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        variant: str = "per_token",
    ):
        """A layer of zeros, to load a checkpoint into; ``from_linear`` makes one with values.

        Args:
            in_features: K, a multiple of 16 (``mxfp8``: 32).
            out_features: N, a multiple of 8.
            bias: whether there is one.
            device: of the parameters.
            dtype: of the bias: bf16, fp16 or fp32.
            variant: ``per_token`` or ``mxfp8``.

        Raises:
            TypeError: another dtype.
            ValueError: another variant, or a size that is no such multiple.
        """
        check_variant(variant)
        if bias:
            _check_bias_dtype("dtype", dtype or torch.get_default_dtype())
        check_size("in_features, out_features", out_features, in_features, variant)
        shape = (out_features, in_features)
        codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
        if variant == "mxfp8":
            columns = in_features // MX_BLOCK
            scale = torch.zeros((out_features, columns), dtype=torch.uint8, device=device)
            scale = scale.view(E8M0)
        else:
            scale = torch.ones((out_features, 1), dtype=torch.float32, device=device)
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self._fill(codes, scale, zeros)

    def _fill(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """Begin as a module that has these. No other weight is ever allocated."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = codes.shape
        self.fast_accum = False
        self.weight = Parameter(codes, requires_grad=False)
        self._parameters[SCALE] = Parameter(scale, requires_grad=False)
        kept = None if bias is None else Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", kept)
        self.register_buffer("scale_blocks", None, persistent=False)
        self.scales_changed()

    @classmethod
    def from_linear(cls, linear: nn.Linear, variant: str = "per_token") -> Linear:
        """Quantise the weight of ``linear``, whose bias is shared and which is left as it is.

        Reads values, and so refuses to run while a CUDA graph is captured.

        Raises:
            TypeError: no ``nn.Linear``, or one that is quantised already, or no float weight.
            ValueError: another variant, N no multiple of 8, K no multiple of 16 (``mxfp8``: 32), or
                a NaN or Inf in the weight.
            RuntimeError: called while a CUDA graph is being captured.
        """
        check_variant(variant)
        if not isinstance(linear, nn.Linear) or isinstance(linear, Linear):
            raise TypeError(f"linear: got {type(linear).__name__}, must be an nn.Linear")
        check_size("linear", linear.out_features, linear.in_features, variant)
        layer = cls.from_quantized(*quantize_weight(linear.weight, variant), linear.bias)
        return layer.train(linear.training)

    @classmethod
    def from_quantized(cls, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Linear:
        """Take codes and scales as they are; the scales choose the variant.

        Args:
            codes: ``[N, K]`` float8_e4m3fn.
            scale: fp32 ``(N,)``, ``(N, 1)``, ``(1, N)`` or one element; or float8_e8m0fnu
                ``[N, K/32]``, or those in 128x4 blocks.
            bias: ``[N]`` bf16, fp16 or fp32.

        Raises:
            TypeError, ValueError: a dtype or shape that does not belong here.
        """
        if check_tensor("codes", codes).dtype is not E4M3:
            raise TypeError(f"codes: got {codes.dtype}, must be torch.float8_e4m3fn")
        if codes.dim() != 2:
            raise ValueError(f"codes: got shape {tuple(codes.shape)}, must be 2-D [N, K]")
        n, k = codes.shape
        scale = module_scale(check_tensor("scale", scale), n, k)
        variant = "mxfp8" if scale.dtype is E8M0 else "per_token"
        check_size("codes", n, k, variant)
        if bias is not None:
            _check_bias_dtype("bias", check_tensor("bias", bias).dtype)
            if bias.shape != (n,):
                raise ValueError(f"bias: got shape {tuple(bias.shape)}, must be ({n},)")
        for name, tensor in (("scale", scale), ("bias", bias)):
            if tensor is not None and tensor.device != codes.device:
                raise ValueError(
                    f"{name}: got device {tensor.device}, must be {codes.device} as codes is"
                )
        layer = cls.__new__(cls)
        layer._fill(aligned(codes.detach().contiguous()), scale.detach(), bias)
        return layer

    @property
    def weight_scale(self) -> Tensor:
        """The scales; see the class. After :meth:`keep_blocks` a copy, made at every look."""
        rows = self._parameters[SCALE]
        if rows is not None:
            return rows
        assert self.scale_blocks is not None
        blocks = self.scale_blocks.view(E8M0)
        return from_blocked(blocks, self.out_features, self.in_features // MX_BLOCK)

    @property
    def gemm_scale(self) -> Tensor:
        """The scales in the form that costs a GEMM no further launch.

        Blocks are laid out anew if ``weight_scale`` is another tensor than the one they were made
        from or, but for a compiled call, if it was written to in a way that torch counts.
        """
        rows, blocks = self._parameters[SCALE], self.scale_blocks
        if blocks is None:
            return self.weight_scale
        if rows is None or self._is_laid_out(rows):
            return blocks.view(E8M0)
        if rows.dtype is not E8M0:
            return rows
        if not has_storage(rows) or is_capturing():
            # For this call only: what is made now has no values, or is a graph's own.
            return to_blocked(rows.detach())
        self.scales_changed()
        return self.gemm_scale

    def _is_laid_out(self, rows: Tensor) -> bool:
        if torch.compiler.is_exporting():
            return True  # where tensors stand in for the parameters
        if self._laid_out is None or self._laid_out[0] is not rows:
            return False
        # A version would be a guard, and every write a recompilation.
        return torch.compiler.is_compiling() or self._laid_out[1] == _written(rows)

    @property
    def variant(self) -> str:
        """``per_token`` or ``mxfp8``."""
        rows = self._parameters[SCALE]
        return "mxfp8" if rows is None or rows.dtype is E8M0 else "per_token"

    @property
    def weight_bytes(self) -> int:
        """Of codes and scales, in every form that is kept."""
        tensors = (self.weight, self._parameters[SCALE], self.scale_blocks)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` bf16, fp16 or fp32 to ``[..., N]``."""
        if type(self.weight).__name__ == "DTensor":
            from cute_fp8.models import tensor_parallel

            return tensor_parallel.forward(self, x)
        return self.forward_quantized(*quantize_input(x, self.variant), out_dtype_of(x))

    def forward_quantized(self, xq: Tensor, sx: Tensor, out_dtype: torch.dtype) -> Tensor:
        """The same on codes and scales, as a producer of this layer's variant gives them."""
        sw, fast = self.gemm_scale, self.fast_accum
        y = gemm(xq, sx, self.weight, sw, self.bias, out_dtype=out_dtype, fast_accum=fast)
        assert isinstance(y, Tensor)
        return y

    def scales_changed(self, scale: Tensor | None = None) -> None:
        """Lay the blocks of ``weight_scale`` out anew.

        To be called by whoever wrote to it past torch, through ``.data`` or in a CUDA graph, and
        before a compiled call after any write in place. Loading a state dict does it.

        Args:
            scale: what ``weight_scale`` is to be, where only blocks are kept.
        """
        scale = self._parameters[SCALE] if scale is None else scale
        if scale is None:
            return
        blocks = None
        if scale.dtype is E8M0:
            with torch.no_grad():
                blocks = to_blocked(scale.detach()).view(torch.uint8)
        self.scale_blocks = blocks
        self._note_laid_out()

    def _note_laid_out(self) -> None:
        rows = None if self.scale_blocks is None else self._parameters[SCALE]
        self._laid_out = None if rows is None else (rows, _written(rows))

    def keep_blocks(self) -> None:
        """Of MXFP8 scales keep the blocks only; in a state dict they stay what they are.

        ``weight_scale`` is no parameter then, which tensor parallelism would need.
        """
        rows = self._parameters[SCALE]
        if self.scale_blocks is not None and rows is not None:
            if not self._is_laid_out(rows):
                self.scales_changed()
            self._parameters[SCALE] = self._laid_out = None

    def reset_parameters(self) -> None:
        """Nothing: there is no distribution to draw codes and scales from."""

    def extra_repr(self) -> str:
        """Sizes, and the variant."""
        return f"{super().extra_repr()}, variant={self.variant}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        """Moves go through; casts meet codes and scales as integers, which they leave alone."""

        def apply(tensor: Tensor) -> Tensor:
            own = (self.weight, self._parameters[SCALE], self.scale_blocks)
            if not any(tensor is t for t in own):
                return fn(tensor)
            integer = torch.int32 if tensor.dtype is torch.float32 else torch.uint8
            moved = fn(tensor.detach().view(integer))
            return moved.view(tensor.dtype) if moved.dtype is integer else tensor.detach()

        rows = self._parameters[SCALE]
        followed = rows is not None and self._is_laid_out(rows)
        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        if followed:
            self._note_laid_out()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: torch's pickles cannot read float8 storages back."""
        state = self.__dict__.copy()
        parameters = dict(self._parameters)
        for name, tensor in parameters.items():
            if type(tensor) is Parameter and tensor.dtype in (E4M3, E8M0):
                parameters[name] = Parameter(tensor.detach().view(torch.uint8), False)
        blocks = self.scale_blocks if parameters[SCALE] is None else None
        buffers = {"scale_blocks": blocks}
        return state | {"_parameters": parameters, "_buffers": buffers, "_laid_out": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The float8 dtypes again, and the blocks of scales."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in (("weight", E4M3), (SCALE, E8M0)):
            tensor = self._parameters[name]
            if tensor is not None and tensor.dtype is torch.uint8:
                self._parameters[name] = Parameter(tensor.detach().view(dtype), False)
        self.scales_changed()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._parameters[SCALE] is None:
            destination[prefix + SCALE] = self.weight_scale

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        """Refuses what a copy would round to codes, and takes scales in their usual shapes."""
        *_, missing, unexpected, error_msgs = arguments
        weight, scale = (state_dict.get(prefix + name) for name in ("weight", SCALE))
        if weight is not None and weight.dtype is not E4M3:
            error_msgs.append(
                f"{prefix}weight: got {weight.dtype}, must be torch.float8_e4m3fn "
                "(Linear.from_linear or convert quantise)"
            )
            return
        if scale is not None:
            try:
                scale = module_scale(scale, self.out_features, self.in_features)
                own = E8M0 if self.variant == "mxfp8" else torch.float32
                if scale.dtype is not own:
                    raise TypeError(f"scale: got {scale.dtype}, must be {own} ({self.variant})")
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix}weight_{error}")
                return
            state_dict[prefix + SCALE] = scale
        if weight is not None:
            state_dict[prefix + "weight"] = aligned(weight)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)
        if self._parameters[SCALE] is None:
            # No parameter of it, so that nobody has looked for it, or copied it.
            if scale is None:
                missing.append(prefix + SCALE)
                return
            unexpected[:] = [key for key in unexpected if key != prefix + SCALE]
            scale = scale.to(self.weight.device)
        self.scales_changed(scale if self._parameters[SCALE] is None else None)


def _written(scale: Tensor) -> tuple[int | None, int]:
    """What a write to a tensor changes, as far as torch knows; inference tensors count nothing."""
    version = None if scale.is_inference() else scale._version
    return version, scale.data_ptr() if type(scale) in PLAIN else 0


def _check_bias_dtype(argument: str, dtype: torch.dtype) -> None:
    if dtype not in OUT_DTYPES:
        raise TypeError(
            f"{argument}: got {dtype}, must be torch.bfloat16, torch.float16 or torch.float32"
        )
