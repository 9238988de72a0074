"""Whether a CUDA graph is being captured, asked without waking CUDA up."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """True while the current stream captures a CUDA graph; False where CUDA was never used."""
    initialized = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()
