"""A small language model of characters: F.cross_entropy beside lossops.cross_entropy.

    python examples/char_lm.py [--device cuda] [--compile] [--autocast] [--plot curves.png]

Trains the same model twice on the same batches, once with each loss, and compares them. The text is
nine sonnets of Shakespeare's. On the CPU the model has a class for each character. On a GPU it has
32768 classes, as many as a real language model, of which the text uses few: there the loss takes
most of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from comparing import Loss, compare, parse
from torch import Tensor

import lossops

TEXT = (Path(__file__).parent / "sonnets.txt").read_text()


class CharacterModel(torch.nn.Module):
    """One layer of a transformer."""

    def __init__(self, classes: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(classes, width)
        self.position = torch.nn.Parameter(0.02 * torch.randn(length, width))
        self.layer = torch.nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.output = torch.nn.Linear(width, classes)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.position
        logits: Tensor = self.output(self.layer(x, src_mask=self.mask, is_causal=True))
        return logits


def batches(steps: int, rows: int, length: int, device: str) -> Iterator[tuple[Tensor, ...]]:
    alphabet = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    text = torch.tensor([alphabet[character] for character in TEXT])
    windows = text.unfold(0, length + 1, 1)
    for _ in range(steps):
        chosen = windows[torch.randint(len(windows), (rows,))].to(device)
        yield chosen[:, :-1], chosen[:, 1:]


def step(model: torch.nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
    logits = model(batch[0])
    return loss(logits.flatten(0, 1), batch[1].flatten())


def main() -> None:
    options = parse(__doc__, steps_cpu=200, steps_cuda=200)
    torch.manual_seed(0)
    large = options.device.startswith("cuda")
    classes, width = (32768, 256) if large else (len(set(TEXT)), 64)
    rows, length = (64, 128) if large else (16, 64)
    model = CharacterModel(classes, width, length).to(options.device)
    compare(
        f"Characters of nine sonnets, {classes} classes",
        model,
        batches(options.steps, rows, length, options.device),
        step,
        {"F.cross_entropy": F.cross_entropy, "lossops.cross_entropy": lossops.cross_entropy},
        options,
    )


if __name__ == "__main__":
    main()
