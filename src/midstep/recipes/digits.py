"""The built-in recipe `digits`: a small image classifier with BatchNorm on handwritten digits.

The 1,797 images of 8 x 8 ship with scikit-learn, so there is no download. BatchNorm normalises over
the rows of one forward, and a microbatch is one forward: four microbatches of 32 rows are each
normalised by their own 32. So the accumulated gradient of this recipe is *not* that of its window
at once, whoever accumulates it. `midstep verify digits` shows the gap; with
`digits(seed=0, norm=lambda channels: nn.GroupNorm(4, channels))` the equality is back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ..clip.norm import ByGlobalNorm
from ..counts import targets
from ..errors import RecipeError
from ..losses import LossSum, cross_entropy
from ..schedules import Schedule, cosine
from .recipe import Recipe

__all__ = ["Batch", "ConvNet", "Images", "Split", "digits", "images", "recipe"]

NUM_CLASSES = 10
HELD_OUT_SHARE = 5  # the last fifth
_NOTE = (
    "BatchNorm normalises the rows of one forward: the gradient depends on how many rows a "
    "microbatch has, not only on the window"
)


class Batch(TypedDict):
    """One image, or images stacked."""

    images: Tensor  # [..., 1, 8, 8] float32, from 0 (paper) to 1 (ink)
    labels: Tensor  # [...] int64, the digit


class Images(Dataset[Batch]):
    """Images with their digits, in the order of the data set.

    Args:
        images: Shape [rows, 1, 8, 8], float32.
        labels: Shape [rows], int64.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return Batch(images=self.images[index], labels=self.labels[index])


class Split(NamedTuple):
    """Images to train on and images to judge by."""

    train: Images
    held_out: Images


def images() -> Split:
    """Return the digits that ship with scikit-learn, split by their order.

    Writers follow each other in it, so the last fifth is held out: mostly other hands than those of
    the training images. A random split would ask about hands that were trained on.

    Raises:
        RecipeError: scikit-learn is not installed.

    Example:
        >>> train, held_out = images()
        >>> len(train), len(held_out), train[0]["images"].shape, train[0]["labels"]
        (1437, 360, torch.Size([1, 8, 8]), tensor(0))

    Reference: Alpaydin & Kaynak 1998, "Optical recognition of handwritten digits", UCI.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise RecipeError(
            "`digits` needs scikit-learn, which its images ship with. Install it with `pip install "
            "'midstep[digits]'`, or take a recipe that needs nothing: `language` or `pairs`."
        ) from error
    data = load_digits()
    pixels = torch.from_numpy(data.images).to(torch.float32).div_(16).unsqueeze(1)
    labels = torch.from_numpy(data.target).to(torch.int64)
    cut = len(labels) - len(labels) // HELD_OUT_SHARE - 1
    return Split(Images(pixels[:cut], labels[:cut]), Images(pixels[cut:], labels[cut:]))


class ConvNet(nn.Module):
    """Tells digits apart: three convolutions, each normalised, and a linear layer.

    Args:
        width: Channels of the first convolution; twice and four times as many follow.
        norm: Makes the layer after each convolution from its number of channels.

    Example:
        >>> ConvNet(width=8)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])

    Reference: Ioffe & Szegedy 2015, arXiv:1502.03167.
    """

    def __init__(
        self, *, width: int = 16, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for wider, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            # No bias: the layer after it has one of its own.
            layers += [nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False), norm(wider)]
            layers.append(nn.ReLU())
            channels = wider
        self.features = nn.Sequential(*layers)
        self.classes = nn.Linear(channels, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits.

        Args:
            images: Shape [rows, 1, 8, 8].

        Returns:
            Shape [rows, 10].
        """
        logits: Tensor = self.classes(self.features(images).mean(dim=(2, 3)))
        return logits


def recipe(seed: int) -> Recipe:
    """Return the recipe at its usual size.

    Args:
        seed: Decides the first weights and the order of the images.
    """
    return digits(seed=seed)


def digits(
    *, seed: int, width: int = 16, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
) -> Recipe:
    """Return the recipe at any size, with any layer for normalising.

    The model is put on the accelerator where there is one.

    Args:
        seed: Decides the first weights and the order of the images.
        width: Channels of the first convolution.
        norm: Makes the layer after each convolution from its number of channels.

    Example:
        >>> exact = digits(seed=0, norm=lambda channels: torch.nn.GroupNorm(4, channels))
        >>> exact.size, list(exact.baselines)
        (4, ['class frequencies', 'a linear discriminant'])
    """
    torch.manual_seed(seed)
    model = ConvNet(width=width, norm=norm)
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        model.to(accelerator)
    train, held_out = images()
    order = torch.Generator().manual_seed(seed)
    return Recipe(
        model=model,
        train=DataLoader(train, batch_size=32, shuffle=True, generator=order),
        # One with a generator of its own: to iterate it must not move the global stream.
        held_out=DataLoader(held_out, batch_size=180, generator=torch.Generator()),
        loss=_loss,
        count=targets(key="labels"),
        optimizer=_optimizer,
        lr=3e-3,
        size=4,
        steps=200,
        clip=ByGlobalNorm(1.0),
        schedule=_schedule,
        baselines={
            "class frequencies": _frequency_baseline(train, held_out),
            "a linear discriminant": _linear_baseline(train, held_out),
        },
        notes=[_NOTE] if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) else [],
    )


def _loss(model: ConvNet, batch: Batch) -> LossSum:
    device = model.classes.weight.device
    return cross_entropy(model(batch["images"].to(device)), batch["labels"].to(device))


def _optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    # Decay is for what multiplies inputs: it would pull the gains of the norms to 0.
    weights = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def _schedule(steps: int) -> Schedule:
    return cosine(total=steps, warmup=steps // 10, minimum=0.1)


def _frequency_baseline(train: Images, held_out: Images) -> float:
    """The held-out loss of a model that knows how frequent each digit is, and sees no image."""
    counts = torch.bincount(train.labels, minlength=NUM_CLASSES).double()
    return float((counts.sum().log() - counts.log())[held_out.labels].mean())


def _linear_baseline(train: Images, held_out: Images) -> float:
    """The held-out loss of linear discriminant analysis: a model that is linear in the pixels.

    log p(digit | image) = const + mean' S^-1 image - mean' S^-1 mean / 2

    with S the covariance of the training images around the mean of their digit, plus a hundredth.
    """
    x, y = train.images.double().flatten(1), train.labels
    means = torch.stack([x[y == digit].mean(dim=0) for digit in range(NUM_CLASSES)])
    spread = (x - means[y]).T @ (x - means[y]) / len(x)
    towards = torch.linalg.solve(spread + 0.01 * torch.eye(len(spread)).double(), means.T)
    offsets = (means * towards.T).sum(dim=1) / 2
    logits = held_out.images.double().flatten(1) @ towards - offsets
    return float(F.cross_entropy(logits, held_out.labels))
