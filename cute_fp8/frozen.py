"""Row-major weight scales whose owner says that they stay as they are: their blocks are made once.

A GEMM reads e8m0 scales in the 128x4 blocked order; row-major ones cost one launch more a call. A
weight's would be brought into the same blocks every time, but no library can see that: a write
through ``sw.data``, or by the replay of a graph, leaves no trace. So the owner has to say it::

    cute_fp8.freeze_scales(sw)              # once, where the model is loaded
    y = cute_fp8.gemm(xq, sx, wq, sw)       # with this very tensor: no launch for sw

Whoever needs no row-major scales otherwise has it simpler still with ``sw = to_blocked(sw)``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from cute_fp8.capture import is_capturing
from cute_fp8.scales import to_blocked


@dataclass
class _Kept:
    """The blocks of one tensor.

    Attributes:
        blocked: its scales in 128x4 blocks, made by work that has ended.
        alias: keeps its memory in use, so that no other tensor can get its address.
        state: how it was when it was frozen.
        streams: those that ``blocked`` may be read on, and is not given back before.
    """

    blocked: Tensor
    alias: Tensor
    state: tuple[Any, ...]
    streams: set[Any] = field(default_factory=set)


#: By tensor object; an entry goes when its tensor does.
_kept: MutableMapping[Tensor, _Kept] = WeakIdKeyDictionary()


def freeze_scales(sw: Tensor) -> Tensor:
    """Promise that a weight's row-major e8m0 scales stay as they are; keep their blocked form.

    Calls of ``gemm`` with this very tensor (no view or copy of it; not under ``torch.compile``)
    read the kept form and launch nothing for ``sw``, on any stream and while a graph is captured.
    It lives as long as the tensor, which must outlive graphs captured with it.

    Writing to a frozen tensor is an error of the caller. A write that torch's version counter sees,
    or another ``sw.data``, ends the promise: later calls re-lay the scales each, as if it had not
    been given. A write through ``sw.data`` or by a graph goes unseen, and the old scales are used.
    Waits for the GPU.

    Args:
        sw: ``[N, K/32]`` float8_e8m0fnu, contiguous.

    Returns:
        ``sw``.

    Raises:
        TypeError: no plain tensor, or another dtype.
        ValueError: not 2-D, or not contiguous.
        RuntimeError: called while a CUDA graph is being captured.
    """
    if type(sw) not in (Tensor, Parameter):
        raise TypeError(f"sw: got {type(sw).__name__}, must be a torch.Tensor")
    if sw.dtype is not torch.float8_e8m0fnu:
        raise TypeError(f"sw: got {sw.dtype}, must be torch.float8_e8m0fnu")
    if sw.dim() != 2:
        raise ValueError(f"sw: got shape {tuple(sw.shape)}, must be 2-D [N, K/32]")
    if not sw.is_contiguous():
        raise ValueError(f"sw: got strides {tuple(sw.stride())}, must be contiguous")
    if is_capturing():
        raise RuntimeError(
            "freeze_scales: got a call during CUDA graph capture, must be called before it"
        )
    with torch.no_grad():
        blocked, alias = to_blocked(sw), sw.detach()
    kept = _Kept(blocked, alias, _state(sw))
    if sw.is_cuda:
        stream = torch.cuda.current_stream(sw.device)
        stream.synchronize()
        kept.streams.add(stream)
    _kept[sw] = kept
    return sw


def frozen_blocks(sw: Tensor) -> Tensor | None:
    """The kept blocks of frozen scales; None for others, and for those written to since."""
    kept = _kept.get(sw) if _kept else None
    if kept is None:
        return None
    if kept.state != _state(sw):
        _kept.pop(sw, None)
        return None
    if sw.is_cuda and (stream := torch.cuda.current_stream(sw.device)) not in kept.streams:
        kept.blocked.record_stream(stream)
        kept.streams.add(stream)
    return kept.blocked


def _state(sw: Tensor) -> tuple[Any, ...]:
    """What a change of ``sw`` changes, as far as torch knows; inference tensors count nothing."""
    version = None if sw.is_inference() else sw._version
    return sw.data_ptr(), version, sw.shape, sw.stride()
