"""A small model of every kind of tensor, and comparisons of its state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cute_fp8

BF16 = torch.bfloat16
INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    """Sizes that are no multiples of a block, a bias, a tied head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 160)
        self.up = nn.Linear(160, 288)
        self.down = nn.Linear(288, 160, bias=False)
        self.norm = nn.LayerNorm(160)
        self.lm_head = nn.Linear(160, 48, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.lm_head(self.norm(x + self.down(torch.relu(self.up(x)))))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net().to(BF16)
    model.steps.fill_(seed)
    return model


TOKENS = torch.arange(48).view(2, 24)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype
        and torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))
        for n in a
    )


def layers_of(model: nn.Module) -> dict[str, cute_fp8.Linear]:
    return {n: m for n, m in model.named_modules() if type(m) is cute_fp8.Linear}
