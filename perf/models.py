"""A decoder of Llama 8B's size with random weights, converted: memory, prefill and decode times.

    python -m perf.models FILE [--seconds 90] [--minilm FILE]
    python -m perf.models FILE --dry-run          # small, on the CPU

Beside it the same model in bf16 and, where it is installed, torchao's per-row FP8, which is run
eagerly here: its quantiser is meant to be compiled. Ours comes as decoder blocks, with fused
projections, and with every projection by itself. Everything is timed as one CUDA graph a call.
Decode steps read a cache of random keys and values, the same for all: one that grows, which
transformers copies at every step, or one of a fixed size, under a mask. A row's ``error`` is the
relative L2 distance of the logits from bf16's, the worst token's; of random weights, although each
layer adds little, it says how errors add up, not what a trained model loses. An encoder of
MiniLM's size with random weights is judged, too; with ``--minilm``, a file that ``minilm_file`` has
written, also the similarities of MiniLM itself.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cute_fp8
from cute_fp8.build import compiler
from cute_fp8.environment import commit, environment
from cute_fp8.targets import target_of
from cute_fp8.timing import gpu_us
from perf.encoders import compare_minilm, random_encoder
from perf.model_cases import BF16, CASES, LARGE, SMALL, Case, distances
from perf.results_io import Row, save

#: How ours is converted, by the name of a row's ``impl``.
OURS: dict[str, Any] = {
    "cute_fp8": True,
    "cute_fp8_projections": "projections",
    "cute_fp8_linears": False,
}
REPLAYS = 15
#: Of a prefill, so many tokens are judged, not only the last, whose logits are computed.
JUDGED = 256


@dataclass
class Study:
    """What is measured, and how long it may take.

    Attributes:
        device: ``cuda``; ``cpu`` for the dry run.
        sizes: of the decoder.
        seconds: after so many, nothing new is begun.
        rows: as in a result file.
        facts: what is no time: memory, accuracy.
    """

    device: str
    sizes: dict[str, int]
    seconds: float
    begun: float = field(default_factory=time.perf_counter)
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.begun

    def say(self, what: str) -> None:
        """A line of progress."""
        print(f"[{self.spent:5.1f} s] {what}", file=sys.stderr, flush=True)

    def cases(self) -> Iterator[tuple[str, int, int, int]]:
        """The cases, smaller in a dry run."""
        for name, batch, tokens, cached in CASES:
            scale = 1 if self.device == "cuda" else 64
            yield name, batch, -(-tokens // scale), -(-cached // scale)

    def decoder(self) -> Any:
        """The model in bf16, the same at every call."""
        import transformers

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(BF16)
        try:
            with torch.device(self.device):
                model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**self.sizes))
        finally:
            torch.set_default_dtype(before)
        # As in trained models, a layer adds little to what its input is.
        little = (2 * self.sizes["num_hidden_layers"]) ** -0.5
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(50)
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.mul_(little)
        return model.eval()

    def time_model(self, model: Any, impl: str, variant: str) -> None:
        """A row for each case."""
        accuracy = self.facts.setdefault("logits", {}).setdefault(f"{impl} {variant}", {})
        for name, batch, tokens, cached in self.cases():
            if self.spent > self.seconds:
                self.say(f"{impl}: {name} x {batch} is left out, the time is over")
                continue
            case = Case(self.sizes, self.device, name, batch, tokens, cached)
            head: Row = {"op": f"llama8b_{name}", "variant": variant, "impl": impl}
            head |= {"M": batch * tokens, "N": self.sizes["hidden_size"]}
            head |= {"K": self.sizes["intermediate_size"]}
            key = f"{name} {batch}x{tokens}+{cached}"
            try:
                with torch.inference_mode():
                    y = case.run(model, min(tokens, JUDGED)).flatten(0, 1).clone()
                    times = self._times(lambda case=case: case.run(model, 1))  # type: ignore[misc]
            except Exception as error:
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                self.rows.append({**head, "failed": why})
                self.say(f"{impl} {variant}: {key}: {why}")
                continue
            found = accuracy[key] = distances(y, self.expected.setdefault(key, y))
            us = statistics.median(times)
            figures = {"us": us, "us_min": min(times), "us_max": max(times)}
            self.rows.append({**head, **figures, "error": found["worst_rel_l2"]})
            self.say(f"{impl} {variant}: {key}: {us:.0f} us, logits {found['rel_l2']:.4f} off")

    def _times(self, call: Callable[[], Tensor]) -> list[float]:
        """Microseconds of each replay."""
        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return [(time.perf_counter() - start) * 1e6]
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # compiles what cannot be compiled during a capture
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        times = [gpu_us(graph.replay) for _ in range(3 + REPLAYS)]
        return times[3:]  # the first three warm up

    # ------------------------------------------------------------------------------- memory

    def convert(self, model: nn.Module, variant: str, fuse: Any = True) -> None:
        """Convert in place; bytes before, at most meanwhile, and after."""
        gc.collect()
        before = self._bytes(model)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        allocated = self._allocated(model)
        start = time.perf_counter()
        report = cute_fp8.convert(model, variant=variant, fuse=fuse)
        self._synchronize()
        seconds = time.perf_counter() - start
        gc.collect()
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        found = {
            "quantised": len(report.quantised),
            "fused": len(report.fused),
            "blocks": len(report.blocks),
            "seconds": round(seconds, 2),
            "bf16_bytes": before,
            "end_bytes": self._bytes(model),
            "end_ratio": round(self._bytes(model) / before, 4),
            "worst_weight_rel_l2": max(layer.weight_rel_l2 or 0.0 for layer in report.quantised),
        }
        if self.device == "cuda":
            # What other things hold, which conversion has nothing to do with.
            others = allocated - before
            found["peak_bytes"] = peak - others
            found["peak_ratio"] = round((peak - others) / before, 4)
            found["allocated_end_ratio"] = round((self._allocated(model) - others) / before, 4)
        self.facts[f"convert {variant}, fuse={fuse}"] = found
        self.say(f"converted: {found}")

    def _allocated(self, model: nn.Module) -> int:
        if self.device == "cuda":
            return int(torch.cuda.memory_allocated())
        return self._bytes(model)

    @staticmethod
    def _bytes(model: nn.Module) -> int:
        return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    # ------------------------------------------------------------------------------- steps

    def fill(self) -> None:
        """Compile the larger ones of what the cases take, side by side."""
        if self.device == "cpu":
            return
        hidden, ffn, head = (
            self.sizes[n] for n in ("hidden_size", "intermediate_size", "head_dim")
        )
        wide = self.sizes["num_attention_heads"] * head
        columns = wide + 2 * self.sizes["num_key_value_heads"] * head
        bf16 = {"residual": BF16}
        calls: list[tuple[str, dict[str, Any]]] = [
            ("gemm", {"n": columns, "k": hidden}),
            *(("gemm", {"n": hidden, "k": k, **more}) for k in (wide, ffn) for more in ({}, bf16)),
            *(("gemm", {"n": n, "k": hidden}) for n in (hidden, columns - wide, ffn)),
            ("gemm_gated", {"n": 2 * ffn, "k": hidden, "activation": "silu"}),
            ("decoder_mlp", {"n": ffn, "k": hidden}),
            *(("quantize", {"k": k}) for k in (hidden, wide, ffn)),
        ]
        configs: dict[Any, None] = {}
        for m in {batch * tokens for _, batch, tokens, _ in self.cases()}:
            for op, problem in calls:
                route = cute_fp8.explain(op, m=m, device="cuda", **problem).route
                if route is not None:
                    picked = route.pick.config if route.pick else route.rows or route.block
                    configs |= {} if picked is None else {picked: None}
        target = target_of(torch.cuda.get_device_capability())
        for _ in compiler.fill_disk([*configs], target):
            pass
        self.say(f"{len(configs)} kernels are ready")

    def run(self, minilm: Path | None) -> None:
        """All steps, the most wanted first."""
        with ThreadPoolExecutor(1) as beside:  # compiling is other processes' work
            filled = beside.submit(self.fill)
            model = self.decoder()
            self.say("the decoder is there")
            filled.result()
        self.time_model(model, "torch_bf16", "bf16")
        for impl, fuse in OURS.items():
            ours = copy.deepcopy(model)
            self.convert(ours, "per_token", fuse)
            self.time_model(ours, impl, "per_token")
            del ours
            self._free()
        if self.spent < self.seconds:
            ours = copy.deepcopy(model)
            self.convert(ours, "mxfp8")  # its memory; a Hopper GPU has no kernels for it
            del ours
            self._free()
        if self.spent < self.seconds:
            self.facts["random_encoder"] = random_encoder(
                self.device, 64 if self.device == "cuda" else 2
            )
            self.say(f"encoder: {self.facts['random_encoder']}")
        if minilm is not None:
            self.facts["minilm"] = compare_minilm(minilm, self.device)
            self.say(f"MiniLM: {self.facts['minilm']}")
        if (quantize := _torchao()) is None:
            self.facts["torchao"] = "not installed"
        elif self.spent < self.seconds:
            try:
                quantize(model)
            except Exception as error:
                self.facts["torchao"] = f"{type(error).__name__}: {str(error)[:200]}"
                self.say(f"torchao: {self.facts['torchao']}")
            else:
                self.time_model(model, "torchao", "per_token")

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _torchao() -> Callable[[nn.Module], Any] | None:
    """Its per-row dynamic FP8 of every linear layer but the head; None where it is not here."""
    try:
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            PerRow,
            quantize_,
        )
    except ImportError:
        return None
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())

    def quantize(model: nn.Module) -> Any:
        return quantize_(
            model, config, lambda m, name: isinstance(m, nn.Linear) and name != "lm_head"
        )

    return quantize


def main(arguments: list[str] | None = None) -> int:
    """0; 1 if something of ours failed."""
    parser = argparse.ArgumentParser(
        "python -m perf.models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin nothing after so many")
    parser.add_argument("--minilm", type=Path, help="what minilm_file has written")
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    args = parser.parse_args(arguments)
    study = Study("cpu" if args.dry_run else "cuda", SMALL if args.dry_run else LARGE, args.seconds)
    meta: dict[str, Any] = {**environment(), "commit": commit(), "date": date.today().isoformat()}
    meta["gpu"] = "dry run" if args.dry_run else meta["gpu"]
    try:
        study.run(args.minilm)
    finally:
        meta |= {"seconds": round(study.spent, 1), "models": study.facts}
        save(args.out, meta, study.rows)
    return int(any("failed" in r and r["impl"] in OURS for r in study.rows))


if __name__ == "__main__":
    sys.exit(main())
