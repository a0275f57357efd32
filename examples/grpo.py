"""Policy optimisation (GRPO) of the character model: composed torch beside lossops' head.

    python examples/grpo.py [--device cuda] [--classes 8192] [--plot curves.png]

The model of char_lm.py first learns nine sonnets. Then it is rewarded for vowels: it continues
beginnings of the text, several times each, and its reward is the share of vowels in what it writes.
Each step improves the likelihood of the continuations that were better than the others of their
group (GRPO: Shao et al., arXiv:2402.03300). Log-probabilities of the characters and the entropy of
their distribution come from composed torch in one run, and from
lossops.linear_selective_log_softmax, which has no tensor of all logits, in the other. On a GPU the
model has 32768 classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from char_lm import TEXT, CharacterModel, batches
from comparing import parse, report, timed
from torch import Tensor

import lossops

BEGINNING, WRITTEN = 8, 16  # characters
GROUP = 8  # continuations of each beginning
UPDATES = 2  # of the model, for each batch of continuations
TEMPERATURE = 0.9
CLIP = 0.2
REFERENCE_FACTOR = 0.02  # of the divergence from the model that has only read sonnets
ENTROPY_FACTOR = 0.01

# model, characters (rows, length) -> log-probabilities of characters[:, 1:], entropies, both
# (rows, length - 1)
Policy = Callable[[CharacterModel, Tensor], tuple[Tensor, Tensor]]


def composed(model: CharacterModel, characters: Tensor) -> tuple[Tensor, Tensor]:
    logits = model.output(model.hidden(characters[:, :-1])) / TEMPERATURE
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, characters[:, 1:, None]).squeeze(-1), entropy


def by_head(model: CharacterModel, characters: Tensor) -> tuple[Tensor, Tensor]:
    return lossops.linear_selective_log_softmax(
        model.hidden(characters[:, :-1]),
        model.output.weight,
        characters[:, 1:],
        linear_bias=model.output.bias,
        temperature=TEMPERATURE,
        return_entropy=True,
    )


POLICIES: dict[str, Policy] = {
    "composed torch": composed,
    "lossops.linear_selective_log_softmax": by_head,
}


@torch.no_grad()
def written(model: CharacterModel, beginnings: Tensor, generator: torch.Generator) -> Tensor:
    """The beginnings and what the model writes after them."""
    characters = beginnings
    for _ in range(WRITTEN):
        logits = model.output(model.hidden(characters)[:, -1]) / TEMPERATURE
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        characters = torch.cat([characters, chosen], 1)
    return characters


@dataclass
class Training:
    model: CharacterModel
    policy: Policy
    vowels: Tensor  # (classes,), bool
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        """One step. Returns the mean reward of what the model wrote ahead of it."""
        beginnings = batch[0].repeat_interleave(GROUP, 0)
        characters = written(self.model, beginnings, self.generator)
        rewards = self.vowels[characters[:, BEGINNING:]].float().mean(1)
        groups = rewards.view(-1, GROUP)
        better = (groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)
        with torch.no_grad():
            old, _ = self.of_written(self.model, characters)
            reference, _ = self.of_written(self.reference, characters)
        for _ in range(UPDATES):
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(characters, better.view(-1, 1), old, reference).backward()
            self.optimizer.step()
        return rewards.mean()

    def loss(self, characters: Tensor, better: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        log_probs, entropy = self.of_written(self.model, characters)
        ratio = (log_probs - old).exp()
        gain = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)
        apart = reference - log_probs
        divergence = apart.exp() - apart - 1  # an estimate that is never negative
        return (REFERENCE_FACTOR * divergence - gain - ENTROPY_FACTOR * entropy).mean()

    def of_written(self, model: CharacterModel, characters: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the written characters: (rows, WRITTEN)."""
        log_probs, entropy = self.policy(model, characters)
        return log_probs[:, BEGINNING - 1 :], entropy[:, BEGINNING - 1 :]


def reader(classes: int, width: int, device: str) -> CharacterModel:
    """A model that has read the sonnets."""
    model = CharacterModel(classes, width, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for characters, targets in batches(150, 16, 64, device):
        optimizer.zero_grad(set_to_none=True)
        lossops.linear_cross_entropy(
            model.hidden(characters), model.output.weight, targets, linear_bias=model.output.bias
        ).backward()
        optimizer.step()
    return model


def main() -> None:
    alphabet = sorted(set(TEXT))
    options = parse(
        __doc__,
        steps_cpu=50,
        steps_cuda=100,
        what="reward",
        modes=False,
        classes_cpu=len(alphabet),
    )
    torch.manual_seed(0)
    large = options.device.startswith("cuda")
    classes, width = options.classes, 256 if large else 64
    rows = 64 if large else 4
    model = reader(classes, width, options.device)
    vowels = torch.zeros(classes, dtype=torch.bool, device=options.device)
    vowels[[i for i, character in enumerate(alphabet) if character in "aeiou"]] = True
    data = list(batches(options.steps, rows, BEGINNING, options.device))
    runs = {}
    for name, policy in POLICIES.items():
        generator = torch.Generator(options.device).manual_seed(0)
        training = Training(copy.deepcopy(model), policy, vowels, generator)
        runs[name] = timed(training.model, training, data, options)
        text = written(training.model, data[0][0][:1], generator)[0].tolist()
        print(
            f"{name} writes: {''.join(alphabet[i] if i < len(alphabet) else '?' for i in text)!r}"
        )
    report(f"Vowels by GRPO, {classes} classes", runs, options, "reward")


if __name__ == "__main__":
    main()
