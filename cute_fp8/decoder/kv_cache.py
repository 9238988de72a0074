"""A key-value cache of one layer: memory that is filled from the front."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_fp8.arguments import has_storage
from cute_fp8.decoder.rope import Heads, aligned


@dataclass
class KVCache:
    """Keys and values ``[B, heads of keys, capacity, head_dim]`` and how many tokens are in there.

    A decoder block appends behind ``length`` and moves it on. A CUDA graph is captured for one
    length: set it, capture, and the graph writes those very slots at every replay.
    """

    k: Tensor
    v: Tensor
    length: int = 0

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: Heads,
        capacity: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> KVCache:
        """A cache for ``capacity`` tokens of each of ``batch`` sequences.

        Args:
            heads: ``block.config.columns``; :meth:`DecoderBlock.make_cache` knows them.

        Raises:
            TypeError: heads are none.
        """
        if not isinstance(heads, Heads):
            got = type(heads).__name__  # type: ignore[unreachable]
            raise TypeError(f"heads: got {got}, must be Heads, as in block.config.columns")
        shape = (batch, heads.keys, capacity, heads.dim)
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(k, v)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return self.k.shape[2]

    def slots(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the next ``tokens`` slots."""
        return (
            self.k.narrow(2, self.length, tokens),
            self.v.narrow(2, self.length, tokens),
        )

    def filled(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Views of all that is in there with ``tokens`` more."""
        end = self.length + tokens
        return self.k.narrow(2, 0, end), self.v.narrow(2, 0, end)

    def check(self, x: Tensor, heads: Heads) -> None:
        """Raise ``TypeError`` or ``ValueError`` if x ``[B, S, hidden]`` does not fit."""
        batch, tokens, _ = x.shape
        shape = (batch, heads.keys, self.k.shape[2] if self.k.dim() == 4 else 0, heads.dim)
        for name, tensor in (("cache.k", self.k), ("cache.v", self.v)):
            if tuple(tensor.shape) != shape:
                wanted = f"({batch}, {heads.keys}, capacity, {heads.dim})"
                raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, must be {wanted}")
            if tensor.dtype != x.dtype:
                raise TypeError(f"{name}: got {tensor.dtype}, must be {x.dtype} as x is")
            if tensor.device != x.device:
                raise ValueError(f"{name}: got device {tensor.device}, must be {x.device} as x is")
            if tensor.stride(-1) != 1 or not aligned(tensor):
                got = tuple(tensor.stride())
                raise ValueError(f"{name}: got strides {got}, must be 16-byte aligned rows")
        if has_storage(self.k) and self.k.data_ptr() == self.v.data_ptr():
            raise ValueError("cache.v: got the memory of cache.k, must be separate")
        if self.length < 0 or self.length + tokens > self.capacity:
            raise ValueError(
                f"cache: got room for {self.capacity} tokens of which {self.length} are taken, "
                f"must have room for {tokens} more"
            )
