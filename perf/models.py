"""A decoder of Llama 8B's size with random weights, converted: memory, prefill and decode times.

    python -m perf.models FILE [--seconds 50] [--minilm FILE]
    python -m perf.models FILE --dry-run          # small, on the CPU

Beside it the same model in bf16 and, where it is installed, torchao's per-row FP8, which is run
eagerly here: its quantiser is meant to be compiled. Everything is timed as one CUDA graph a call.
Decode steps read a cache of random keys and values, the same for all. A row's ``error`` is the
relative L2 distance of the logits from bf16's; of random weights, 32 layers deep, it says how
errors add up, not what a trained model loses. With ``--minilm``, a file that ``minilm_file`` has
written, the sentence encoder's similarities are compared, too.
"""

from __future__ import annotations

import argparse
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
from cute_fp8 import compiler, demo
from cute_fp8.environment import commit, environment
from cute_fp8.models.modules import VARIANTS
from cute_fp8.targets import target_of
from perf.results_io import Row, save

BF16 = torch.bfloat16
#: Llama 3 8B, and what a dry run makes of it.
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
SMALL = LARGE | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}
#: Name, sequences, tokens of each, tokens in the cache.
CASES = (("prefill", 1, 2048, 0), ("decode", 1, 1, 1024), ("decode", 16, 1, 1024))
REPLAYS = 15


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
        return model.eval()

    def time_model(self, model: Any, impl: str, variant: str) -> None:
        """A row for each case."""
        accuracy = self.facts.setdefault("logits", {}).setdefault(f"{impl} {variant}", {})
        for name, batch, tokens, cached in self.cases():
            if self.spent > self.seconds:
                self.say(f"{impl}: {name} x {batch} is left out, the time is over")
                continue
            call = self._call(model, batch, tokens, cached)
            head: Row = {"op": f"llama8b_{name}", "variant": variant, "impl": impl}
            head |= {"M": batch * tokens, "N": self.sizes["hidden_size"]}
            head |= {"K": self.sizes["intermediate_size"]}
            key = f"{name} {batch}x{tokens}+{cached}"
            try:
                times, y = self._times(call)
            except Exception as error:
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                self.rows.append({**head, "failed": why})
                self.say(f"{impl} {variant}: {key}: {why}")
                continue
            verdict = cute_fp8.near_lossless(y, self.expected.setdefault(key, y))
            accuracy[key] = {"cosine": verdict.cosine, "rel_l2": verdict.rel_l2}
            us = statistics.median(times)
            figures = {"us": us, "us_min": min(times), "us_max": max(times)}
            self.rows.append({**head, **figures, "error": verdict.rel_l2})
            self.say(f"{impl} {variant}: {key}: {us:.0f} us, logits {verdict.rel_l2:.4f} off")

    def _call(self, model: Any, batch: int, tokens: int, cached: int) -> Callable[[], Tensor]:
        """A forward over ``tokens`` new tokens a sequence, after ``cached`` old ones."""
        import transformers

        sizes, device = self.sizes, self.device
        generator = torch.Generator(device).manual_seed(1)
        ids = torch.randint(
            sizes["vocab_size"], (batch, tokens), device=device, generator=generator
        )
        shape = (batch, sizes["num_key_value_heads"], cached, sizes["head_dim"])
        old = [
            tuple(
                torch.randn(shape, device=device, generator=generator, dtype=BF16) for _ in range(2)
            )
            for _ in range(sizes["num_hidden_layers"] if cached else 0)
        ]
        positions = torch.arange(cached, cached + tokens, device=device).expand(batch, -1)

        def call() -> Tensor:
            cache = transformers.DynamicCache()
            for layer, (keys, values) in enumerate(old):
                cache.update(keys, values, layer)
            options: dict[str, Any] = {"use_cache": bool(cached), "logits_to_keep": 1}
            if cached:
                options["past_key_values"] = cache
            y: Tensor = model(ids, position_ids=positions, **options).logits
            return y

        return call

    @torch.inference_mode()
    def _times(self, call: Callable[[], Tensor]) -> tuple[list[float], Tensor]:
        """Microseconds of each replay, and the logits of the last one."""
        if self.device == "cpu":
            start = time.perf_counter()
            y = call()
            return [(time.perf_counter() - start) * 1e6], y
        event: Any = torch.cuda.Event
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # compiles what cannot be compiled during a capture
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        times = []
        for replay in range(-3, REPLAYS):
            begin, end = (event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 0:
                times.append(begin.elapsed_time(end) * 1e3)
        return times, y.clone()

    # ------------------------------------------------------------------------------- memory

    def convert(self, model: nn.Module, variant: str) -> None:
        """Convert in place; bytes before, at most meanwhile, and after."""
        gc.collect()
        before = self._bytes(model)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        allocated = self._allocated(model)
        start = time.perf_counter()
        report = cute_fp8.convert(model, variant=variant)
        self._synchronize()
        seconds = time.perf_counter() - start
        gc.collect()
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        found = {
            "quantised": len(report.quantised),
            "fused": len(report.fused),
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
        self.facts[f"convert {variant}"] = found
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

    def fill(self, variant: str) -> None:
        """Compile the GEMMs that the cases take, side by side."""
        if self.device == "cpu":
            return
        hidden, ffn, head = (
            self.sizes[n] for n in ("hidden_size", "intermediate_size", "head_dim")
        )
        heads = self.sizes["num_attention_heads"] + 2 * self.sizes["num_key_value_heads"]
        shapes = (
            ("gemm", heads * head, hidden),
            ("gemm", hidden, self.sizes["num_attention_heads"] * head),
            ("gemm_gated", 2 * ffn, hidden),
            ("gemm", hidden, ffn),
        )
        configs = {}
        for _, batch, tokens, _ in self.cases():
            for op, n, k in shapes:
                problem = {"m": batch * tokens, "n": n, "k": k, "variant": variant}
                route = cute_fp8.explain(op, **problem, device="cuda").route
                if route is not None and route.pick is not None:
                    configs[route.pick.config] = None
        target = target_of(torch.cuda.get_device_capability())
        for _ in compiler.fill_disk([*configs], target):
            pass
        self.say(f"{len(configs)} GEMM kernels are ready ({variant})")

    def run(self, minilm: Path | None) -> None:
        """All steps, the most wanted first."""
        with ThreadPoolExecutor(1) as beside:  # compiling is other processes' work
            filled = beside.submit(self.fill, "per_token")
            model = self.decoder()
            self.say("the decoder is there")
            self.time_model(model, "torch_bf16", "bf16")
            filled.result()
        self.convert(model, "per_token")
        self.time_model(model, "cute_fp8", "per_token")
        del model
        self._free()
        if minilm is not None:
            self.facts["minilm"] = compare_minilm(minilm, self.device)
            self.say(f"MiniLM: {self.facts['minilm']}")
        if self.spent < self.seconds * 0.6 and (quantize := _torchao()) is not None:
            model = self.decoder()
            try:
                quantize(model)
            except Exception as error:
                self.facts["torchao"] = f"{type(error).__name__}: {str(error)[:200]}"
                self.say(f"torchao: {self.facts['torchao']}")
            else:
                self.time_model(model, "torchao", "per_token")
            del model
            self._free()

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


# ------------------------------------------------------------------------------------- MiniLM


def minilm_file(path: Path) -> None:
    """The encoder in bf16 with the tokens of the sentences, for a machine without its package."""
    from cute_fp8 import demo_model
    from perf.sentences import RELATED, UNRELATED

    encoders = {
        name: demo_model.load(torch.device("cpu"), texts)
        for name, texts in (("related", RELATED), ("unrelated", UNRELATED))
    }
    model = encoders["related"].model.to(BF16)
    data = {
        "config": model.config.to_dict(),
        "state": model.state_dict(),
        "tokens": {name: encoder.tokens for name, encoder in encoders.items()},
    }
    torch.save(data, path)


def compare_minilm(path: Path, device: str) -> dict[str, Any]:
    """Rank correlation and largest difference of similarities, FP8 against bf16, per variant."""
    import transformers

    from cute_fp8.demo_model import Encoder, embed

    data = torch.load(path, weights_only=True)
    data["config"].pop("dtype", None)
    config = transformers.BertConfig(**data["config"])
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        model = transformers.BertModel(config).to(device, BF16).eval()
        model.load_state_dict(data["state"])
        encoders = {
            name: Encoder(model, {key: t.to(device) for key, t in tokens.items()})
            for name, tokens in data["tokens"].items()
        }
        before = {name: embed(model, encoder) for name, encoder in encoders.items()}
        cute_fp8.convert(model, variant=variant)
        for name, encoder in encoders.items():
            old, new = before[name], embed(model, encoder)
            upper = torch.triu_indices(len(old), len(old), offset=1)
            pairs = [(e @ e.T)[upper[0], upper[1]].cpu() for e in (new, old)]
            found[f"{name} {variant}"] = {
                "sentences": len(old),
                "spearman": demo.spearman(*pairs),
                "largest_difference": float((pairs[0] - pairs[1]).abs().max()),
                "least_cosine": float((old * new).sum(dim=1).min()),
            }
    return found


def main(arguments: list[str] | None = None) -> int:
    """0; 1 if something of ours failed."""
    parser = argparse.ArgumentParser(
        "python -m perf.models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=50.0, help="begin nothing after so many")
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
    return int(any("failed" in r and r["impl"] == "cute_fp8" for r in study.rows))


if __name__ == "__main__":
    sys.exit(main())
