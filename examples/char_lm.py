"""A small language model of characters: F.cross_entropy, lossops.cross_entropy, lossops' head.

    python examples/char_lm.py [--device cuda] [--classes 8192] [--compile] [--plot curves.png]

Trains the same model on the same batches, once with each loss, and compares them. The head,
lossops.linear_cross_entropy, computes the loss of the model's last layer without its logits. The
text is nine sonnets of Shakespeare's. On the CPU the model has a class for each character. On a GPU
it has 32768 classes, as many as a real language model, of which the text uses few: there the loss
takes most of a step.
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

    def hidden(self, characters: Tensor) -> Tensor:
        """What the last layer, self.output, gets: (batch, length, width)."""
        length = characters.shape[1]
        x = self.embedding(characters) + self.position[:length]
        mask = self.mask[:length, :length]
        states: Tensor = self.layer(x, src_mask=mask, is_causal=True)
        return states

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.output(self.hidden(characters))
        return logits


def of_logits(loss: Loss) -> Loss:
    def composed(model: CharacterModel, characters: Tensor, targets: Tensor) -> Tensor:
        return loss(model(characters).flatten(0, 1), targets.flatten())

    return composed


def of_hidden_states(model: CharacterModel, characters: Tensor, targets: Tensor) -> Tensor:
    return lossops.linear_cross_entropy(
        model.hidden(characters), model.output.weight, targets, linear_bias=model.output.bias
    )


LOSSES = {
    "F.cross_entropy": of_logits(F.cross_entropy),
    "lossops.cross_entropy": of_logits(lossops.cross_entropy),
    "lossops.linear_cross_entropy": of_hidden_states,
}


def batches(steps: int, rows: int, length: int, device: str) -> Iterator[tuple[Tensor, ...]]:
    alphabet = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    text = torch.tensor([alphabet[character] for character in TEXT])
    windows = text.unfold(0, length + 1, 1)
    for _ in range(steps):
        chosen = windows[torch.randint(len(windows), (rows,))].to(device)
        yield chosen[:, :-1], chosen[:, 1:]


def step(model: torch.nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
    return loss(model, *batch)


def main() -> None:
    alphabet = len(set(TEXT))
    options = parse(__doc__, steps_cpu=200, steps_cuda=200, classes_cpu=alphabet)
    torch.manual_seed(0)
    large = options.device.startswith("cuda")
    classes, width = options.classes, 256 if large else 64
    rows, length = (64, 128) if large else (16, 64)
    model = CharacterModel(classes, width, length).to(options.device)
    compare(
        f"Characters of nine sonnets, {classes} classes",
        model,
        batches(options.steps, rows, length, options.device),
        step,
        LOSSES,
        options,
    )


if __name__ == "__main__":
    main()
