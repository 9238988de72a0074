"""Sentence encoders in FP8: MiniLM from a file, and one of its size with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import cute_fp8
from cute_fp8.demo.run import spearman
from cute_fp8.kernels.config import VARIANTS

BF16 = torch.bfloat16


def minilm_file(path: Path) -> None:
    """The encoder in bf16 with the tokens of the sentences, for a machine without its package."""
    from cute_fp8.demo.encoder import load
    from perf.sentences import RELATED, UNRELATED

    encoders = {
        name: load(torch.device("cpu"), texts)
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

    from cute_fp8.demo.encoder import Encoder, embed

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
                "spearman": spearman(*pairs),
                "largest_difference": float((pairs[0] - pairs[1]).abs().max()),
                "least_cosine": float((old * new).sum(dim=1).min()),
            }
    return found


@torch.no_grad()
def random_encoder(device: str, sentences: int = 64) -> dict[str, Any]:
    """A BERT of MiniLM's size with random weights, converted: its output by the tier.

    How sentences rank says nothing of such weights, so their distances are compared as they are.
    """
    import transformers

    from cute_fp8.demo.encoder import Encoder, embed

    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
    config = transformers.BertConfig(**sizes, num_attention_heads=12)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1000, config.vocab_size, (sentences, 48), generator=generator)
    lengths = torch.randint(8, 49, (sentences, 1), generator=generator)
    tokens = {"input_ids": ids, "attention_mask": (torch.arange(48) < lengths).long()}
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        torch.manual_seed(0)
        model = transformers.BertModel(config).to(device, BF16).eval()
        encoder = Encoder(model, {key: t.to(device) for key, t in tokens.items()})
        mask = encoder.mask
        before, old = model(**encoder.tokens).last_hidden_state[mask], embed(model, encoder)
        report = cute_fp8.convert(model, variant=variant)
        after, new = model(**encoder.tokens).last_hidden_state[mask], embed(model, encoder)
        verdict = cute_fp8.near_lossless(after, before)
        found[variant] = {
            "layers": len(report.quantised),
            "tokens": len(before),
            "passed": verdict.passed,
            "cosine": verdict.cosine,
            "rel_l2": verdict.rel_l2,
            "least_cosine_of_a_sentence": float((old * new).sum(dim=1).min()),
        }
    return found
