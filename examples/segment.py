"""Segmentation, a small network learns to find shapes: F.cross_entropy and lossops.cross_entropy.

    python examples/segment.py [--device cuda] [--compile] [--autocast] [--plot curves.png]
                               [--pictures pictures.png]

Trains the same network twice on the same pictures, once with each loss, and compares them. Plain
discs, striped squares and chequered triangles of random colours lie on a noisy ground, one over
another. Each pixel has the class of its shape, and pixels around an edge have the class index 255,
which the loss ignores. A picture has 513 x 513 pixels on a GPU and 65 x 65 on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from comparing import Loss, compare, parse
from torch import Tensor, nn

import lossops

NAMES = ("ground", "disc", "square", "triangle")
IGNORED = 255  # as in VOC and Cityscapes
EDGE = 1.0  # half the width of an ignored edge, in pixels


class Network(nn.Module):
    """Three resolutions, each with two convolutions, added up on the way back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        ins = (3, *widths[:-1])
        self.down = nn.ModuleList(self.block(i, o) for i, o in zip(ins, widths, strict=True))
        self.up = nn.ModuleList(nn.Conv2d(w, width, 1) for w in widths)
        self.head = nn.Sequential(self.block(width, width), nn.Conv2d(width, len(NAMES), 1))

    @staticmethod
    def block(ins: int, outs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(ins, outs, 3, padding=1),
            nn.GroupNorm(4, outs),
            nn.ReLU(),
            nn.Conv2d(outs, outs, 3, padding=1),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to logits (N, 4, H, W)."""
        size = x.shape[-2:]
        found: Tensor | float = 0.0
        for level, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            if level > 0:
                x = F.max_pool2d(x, 2)
            x = down(x)
            found = found + F.interpolate(up(x), size, mode="bilinear", align_corners=False)
        logits: Tensor = self.head(found)
        return logits


def distance_to(shape: int, x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """The signed distance of each pixel from a shape around (0, 0), negative inside; roughly."""
    if NAMES[shape] == "disc":
        return torch.hypot(x, y) - radius
    if NAMES[shape] == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.85 * radius
    return torch.maximum(0.866 * x.abs() + 0.5 * y, -y) - 0.6 * radius


def draw(pictures: int, size: int, shapes: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Pictures (N, 3, size, size), and their class indices (N, size, size)."""

    def uniform(low: float, high: float, *more: int) -> Tensor:
        return low + (high - low) * torch.rand(pictures, *more, generator=generator)

    axis = torch.arange(size, dtype=torch.float32)
    image = uniform(0, 1, 3, 1, 1).expand(-1, -1, size, size).clone()
    target = torch.zeros(pictures, size, size, dtype=torch.int64)
    for _ in range(shapes):
        centre = uniform(0, size, 2, 1, 1)
        radius = uniform(0.12 * size, 0.25 * size, 1, 1)
        angle = uniform(0, 2 * torch.pi, 1, 1)
        x = axis[None, None, :] - centre[:, 0]
        y = axis[None, :, None] - centre[:, 1]
        x, y = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
        kind = torch.randint(1, len(NAMES), (pictures, 1, 1), generator=generator)
        distance = torch.full_like(x, torch.inf)
        for shape in range(1, len(NAMES)):
            distance = torch.where(kind == shape, distance_to(shape, x, y, radius), distance)
        stripes, rows = torch.cos(2.0 * x), torch.cos(2.0 * y)
        pattern = torch.where(kind == 2, stripes, torch.where(kind == 3, stripes * rows, 0.0))
        inside = distance <= 0
        target = torch.where(inside, kind, target)
        target = torch.where(distance.abs() <= EDGE, IGNORED, target)
        shade = uniform(0, 1, 3, 1, 1) + 0.3 * pattern[:, None]
        image = torch.where(inside[:, None], shade, image)
    noise = torch.randn(image.shape, generator=generator)
    return image + 0.1 * noise, target


def batches(steps: int, pictures: int, size: int, device: str) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield tuple(x.to(device) for x in draw(pictures, size, 4, generator))


def step(model: nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Tensor:
    return loss(model(batch[0]), batch[1])


@torch.no_grad()
def right(model: nn.Module, image: Tensor, target: Tensor) -> float:
    """The share of pixels that are not ignored whose class is found."""
    counts = target != IGNORED
    return (model(image).argmax(1) == target)[counts].float().mean().item()


@torch.no_grad()
def write_pictures(models: dict[str, nn.Module], image: Tensor, target: Tensor, path: Path) -> None:
    """A row for each picture: what is given, what is wanted, and what each model finds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(["#e8e8e8", "#4477aa", "#ee6677", "#228833"]).with_extremes(
        over="black"
    )
    columns = {"picture": image.clamp(0, 1).movedim(1, -1), "classes; black: ignored": target}
    columns |= {name: model(image).argmax(1) for name, model in models.items()}
    figure, axes = pyplot.subplots(
        len(image), len(columns), figsize=(2 * len(columns), 2 * len(image)), layout="constrained"
    )
    for n, row in enumerate(axes):
        for ax, (title, pictures) in zip(row, columns.items(), strict=True):
            ax.imshow(pictures[n].cpu(), cmap=colours, vmin=0, vmax=len(NAMES) - 1)
            ax.set_axis_off()
            if n == 0:
                ax.set_title(title, fontsize=8)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    options = parse(
        __doc__,
        steps_cpu=300,
        steps_cuda=300,
        more=lambda parser: parser.add_argument(
            "--pictures",
            type=Path,
            metavar="FILE",
            help="write what both networks find in new pictures; needs matplotlib (default: none)",
        ),
    )
    torch.manual_seed(0)
    large = options.device.startswith("cuda")
    pictures, size, width = (16, 513, 32) if large else (8, 65, 8)
    losses = {
        "F.cross_entropy": functools.partial(F.cross_entropy, ignore_index=IGNORED),
        "lossops.cross_entropy": functools.partial(lossops.cross_entropy, ignore_index=IGNORED),
    }
    runs = compare(
        f"Segmentation, {size} x {size} pixels",
        Network(width).to(options.device),
        batches(options.steps, pictures, size, options.device),
        step,
        losses,
        options,
    )
    new = torch.Generator().manual_seed(2)
    image, target = (x.to(options.device) for x in draw(32 if large else 64, size, 4, new))
    for name, run in runs.items():
        print(f"{name}: {right(run.model, image, target):.2%} of new pixels right")
    if options.pictures:
        models = {name: run.model for name, run in runs.items()}
        write_pictures(models, image[:4], target[:4], options.pictures)


if __name__ == "__main__":
    main()
