"""Scratch memory of kernels with split-K or a counter of tiles: zeroed once, one per device and
stream, or per graph.

Such a kernel finds its counters at 0 and leaves them at 0, so that launches that follow one another
share a workspace; launches that may overlap must not. Streams therefore have one each. A graph may
be replayed on any stream, so whatever is captured gets its own, whose zeroing is part of the graph:
once per capture and stream, not per call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from cute_fp8.kernels.config import WORKSPACE_COUNTERS, workspace_words
from cute_fp8.kernels.config_sm90 import HopperConfig
from cute_fp8.kernels.configs import AnyGemm

#: Freshly made workspaces are at least this large (4 MB), so that few calls make a larger one.
_LEAST_WORDS = 1 << 20

#: (device index, stream, capture); 0 for no capture.
Key = tuple[int, int, int]
_of_stream: dict[Key, Tensor] = {}
#: Those of captures that have ended are dropped at the next one, and with that the memory goes back
#: to the pool of their graph, to whom it belongs.
_of_capture: dict[Key, Tensor] = {}


_unshared: ContextVar[bool] = ContextVar("cute_fp8_unshared_workspaces", default=False)


@contextmanager
def unshared() -> Iterator[None]:
    """Every launch inside has a workspace of its own, which is not kept.

    For calls whose allocations someone else directs, as ``torch.compile`` does where it makes CUDA
    graphs: it demands that nothing of its pool is kept but outputs.
    """
    token = _unshared.set(True)
    try:
        yield
    finally:
        _unshared.reset(token)


def is_unshared() -> bool:
    """Whether nothing may be kept of the memory that is allocated now."""
    return _unshared.get()


def workspace(device: torch.device, words: int) -> Tensor:
    """At least ``words`` 32-bit words for a launch on the current stream of ``device``.

    The counters at its beginning are 0 when the launch runs.
    """
    if is_unshared():
        return _new(device, words)
    index = device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    if not torch.cuda.is_current_stream_capturing():
        return _at_least(_of_stream, (index, stream, 0), device, words)
    capture = _capture_id(stream)
    for key in [key for key in list(_of_capture) if key[2] != capture]:
        _of_capture.pop(key, None)
    return _at_least(_of_capture, (index, stream, capture), device, words)


def _at_least(store: dict[Key, Tensor], key: Key, device: torch.device, words: int) -> Tensor:
    found = store.get(key)
    if found is None or found.numel() < words:
        found = store[key] = _new(device, max(words, _LEAST_WORDS))
    return found


def _new(device: torch.device, words: int) -> Tensor:
    made = torch.empty(words, dtype=torch.int32, device=device)
    made[:WORKSPACE_COUNTERS].zero_()
    return made


def _capture_id(stream: int) -> int:
    from cuda.bindings import runtime  # a tenth of a second, for captures alone

    error, _, capture, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaStreamGetCaptureInfo: got {error.name}, must be cudaSuccess")
    return int(capture)


def forget() -> None:
    """Drop every workspace (for tests)."""
    _of_stream.clear()
    _of_capture.clear()


def scratch_words(config: AnyGemm, m: int, n: int, splits: int) -> int:
    """32-bit words of workspace that a launch needs: for split-K, or a counter of tiles."""
    if isinstance(config, HopperConfig):
        return int(config.dynamic)
    return workspace_words(config, m, n, splits) if config.split_k else 0
