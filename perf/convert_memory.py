"""How much memory converting a decoder takes, on the CPU, at the real sizes of its layers.

    python -m perf.convert_memory FILE

Two layers of Llama 8B's, with its embeddings and head, are converted. What conversion needs beyond
the model does not depend on how many layers there are, for they are converted one by one; so the
whole model's peak is its own size plus that. Resident memory is Linux's count, reset before.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import cute_fp8
from cute_fp8.environment import commit
from cute_fp8.kernels.config import VARIANTS
from perf.model_cases import LARGE

LAYERS = 2


def decoder(sizes: dict[str, int], device: str) -> Any:
    """A Llama in bf16; on the CPU filled with noise that repeats, which is quicker to draw."""
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    if device == "meta":
        return model
    model.to_empty(device=device)
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            for part in parameter.view(-1).split(len(noise)):
                part.copy_(noise[: len(part)] * 0.02)
    return model


def bytes_of(model: torch.nn.Module) -> int:
    """Of parameters and buffers."""
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def resident(name: str) -> int:
    """Bytes of this process by ``/proc``: ``VmRSS`` now, ``VmHWM`` at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: got no {name}, must be Linux")


def measure(variant: str, sizes: dict[str, int], layers: int) -> dict[str, Any]:
    """Convert ``layers`` layers of a decoder of these sizes; figures of the whole one."""
    whole = bytes_of(decoder(sizes, "meta"))
    model = decoder({**sizes, "num_hidden_layers": layers}, "cpu")
    before = bytes_of(model)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = resident("VmRSS")
    start = time.perf_counter()
    report = cute_fp8.convert(model, variant=variant)
    seconds = time.perf_counter() - start
    above = resident("VmHWM") - base
    saved = (before - bytes_of(model)) * sizes["num_hidden_layers"] // layers
    return {
        "variant": variant,
        "layers": layers,
        "quantised": len(report.quantised),
        "seconds": round(seconds, 1),
        "model_bytes": whole,
        "peak_above_bytes": above,
        "peak_ratio": round((whole + above) / whole, 4),
        "end_ratio": round((whole - saved) / whole, 4),
    }


def main(arguments: list[str]) -> int:
    """Write the figures of both variants."""
    (out,) = arguments
    meta = {"torch": torch.__version__, "commit": commit(), "date": date.today().isoformat()}
    rows = [measure(variant, LARGE, LAYERS) for variant in VARIANTS]
    Path(out).write_text(json.dumps({"meta": meta, "rows": rows}, indent=2) + "\n")
    print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
