"""The built-in recipe `language`: a byte-level transformer on the text of the Python reference.

It needs no download and no tokenizer, and learns something on two CPU cores within a minute. It
decides sizes, optimizer and rates; the text is `corpus`, the model is `gpt`.
"""

from __future__ import annotations

import torch
from torch import nn

from ..clip.norm import ByGlobalNorm
from ..counts import targets
from ..losses import LossSum, cross_entropy
from ..schedules import Schedule, cosine
from .corpus import (
    Batch,
    byte_frequency_baseline,
    held_out_loader,
    language_corpus,
    training_loader,
)
from .gpt import GPT, GPTConfig
from .recipe import Recipe

__all__ = ["language", "recipe"]


def recipe(seed: int) -> Recipe:
    """Return the recipe at its usual size.

    Args:
        seed: Decides the first weights and the order of the text.
    """
    return language(seed=seed)


def language(*, seed: int, config: GPTConfig | None = None, context: int = 256) -> Recipe:
    """Return the recipe at any size.

    The model is put on the accelerator where there is one.

    Args:
        seed: Decides the first weights and the order of the text.
        config: The shape of the model; that of `GPTConfig()` by default.
        context: Bytes in a row.

    Example:
        >>> small = language(seed=0, config=GPTConfig(width=16, depth=1, num_heads=2), context=64)
        >>> small.size, list(small.baselines)
        (4, ['byte frequencies'])
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig() if config is None else config)
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        model.to(accelerator)
    corpus = language_corpus(context=context, seed=seed)
    return Recipe(
        model=model,
        train=training_loader(corpus.train, rows=2, seed=seed),
        held_out=held_out_loader(corpus.held_out, rows=16),
        loss=_loss,
        count=targets(key="labels", shift=True),
        optimizer=_optimizer,
        lr=3e-3,
        size=4,
        steps=400,
        clip=ByGlobalNorm(1.0),
        schedule=_schedule,
        baselines={"byte frequencies": byte_frequency_baseline(corpus.train, corpus.held_out)},
    )


def _loss(model: GPT, batch: Batch) -> LossSum:
    device = model.embedding.weight.device
    logits = model(batch["input_ids"].to(device), batch["document_ids"].to(device))
    return cross_entropy(logits, batch["labels"].to(device), shift=True)


def _optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    # Decay is for matrices: it would pull the gains of the norms to 0, where nothing gets through.
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def _schedule(steps: int) -> Schedule:
    return cosine(total=steps, warmup=steps // 10, minimum=0.1)
