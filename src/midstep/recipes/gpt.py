"""The model of the `language` recipe: a small decoder-only transformer.

It decides the architecture and the first weights. The loss, the precision, the optimizer and the
device are the caller's. The weights come from torch's global generator: call
`torch.manual_seed` first for a reproducible model.

Legend of the shape comments: R rows, T positions in a row (`context`), C channels (`width`),
H heads, D channels of one head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "GPTConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a `GPT`, checked when it is made.

    Attributes:
        vocab_size: Number of ids that are read and predicted; at least 1.
        width: Channels of the residual stream; a multiple of `2 * num_heads`.
        depth: Number of blocks; at least 1.
        num_heads: Attention heads in each block; at least 1.
        dropout: Probability with which an activation is dropped in training; in [0, 1).

    Raises:
        ValueError: A value is outside its range.

    Example:
        >>> GPTConfig(width=64, num_heads=4).head_width
        16
    """

    vocab_size: int = 256
    width: int = 128
    depth: int = 3
    num_heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "depth", "num_heads"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(
                    f"`GPTConfig({name}={value})`: must be at least 1, because nothing is left of "
                    "the model otherwise. Pass a positive integer."
                )
        if self.width % (2 * self.num_heads) != 0:
            raise ValueError(
                f"`GPTConfig(width={self.width}, num_heads={self.num_heads})`: rotary positions "
                "turn the channels of each head in pairs, so `width` must be a multiple of "
                f"`2 * num_heads` = {2 * self.num_heads}. Change one of the two."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"`GPTConfig(dropout={self.dropout})`: must be in [0, 1), because 1 drops every "
                "activation. Pass 0 to drop none."
            )

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.width // self.num_heads

    @property
    def hidden_width(self) -> int:
        """Channels inside the MLP: 8/3 of `width`, rounded up to a multiple of 16.

        A gated MLP has three matrices, so this gives it the parameters of a plain one of 4 `width`.
        """
        return -(-8 * self.width // (3 * 16)) * 16

    @property
    def branch_scale(self) -> float:
        """Size of what a branch first adds to the residual stream.

        There are two branches in a block; scaled so, their sum does not grow with depth (Radford
        et al. 2019, "Language models are unsupervised multitask learners", section 2.3).
        """
        return float((2 * self.depth) ** -0.5)


class GPT(nn.Module):
    """Predicts the next id at every position, for each document of a row as if it were alone.

        logits[r, t] depends on input_ids[r, s]
            only if  s <= t  and  document_ids[r, s] == document_ids[r, t]

    Positions are rotary, so attention sees nothing of them but the distance between two: what is
    predicted for a document does not depend on where in the row it begins, and positions need
    not restart. There is no largest T; the mask takes R * T * T bytes. One matrix embeds the ids
    and reads out the logits.

    Args:
        config: The shape of the model.

    Example:
        >>> model = GPT(GPTConfig(width=32, depth=1, num_heads=2))
        >>> input_ids = torch.tensor([[72, 105, 33, 79, 107]])
        >>> model(input_ids, document_ids=torch.tensor([[0, 0, 0, 1, 1]])).shape
        torch.Size([1, 5, 256])

    Reference: Vaswani et al. 2017, arXiv:1706.03762. Tied embeddings: Press & Wolf 2017,
    arXiv:1608.05859. RMSNorm: Zhang & Sennrich 2019, arXiv:1910.07467. Norm before the branch:
    Xiong et al. 2020, arXiv:2002.04745. SwiGLU: Shazeer 2020, arXiv:2002.05202. Rotary
    positions: Su et al. 2021, arXiv:2104.09864.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        # Small, so that the logits are too: an untrained model is nearly uniform, its loss ln V.
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = rms_norm(config.width)

    def forward(
        self,
        input_ids: Tensor,  # [R, T] int64
        document_ids: Tensor,  # [R, T] int64, the same number within a document
    ) -> Tensor:  # [R, T, V]
        """Return the logits of the id that follows each position."""
        mask = causal_document_mask(document_ids)
        x = self.dropout(self.embedding(input_ids))  # [R, T, C]
        turns = rotary_turns(input_ids.shape[1], self.config.head_width, like=x)
        for block in self.blocks:
            x = block(x, mask, turns)  # [R, T, C]
        return F.linear(self.norm(x), self.embedding.weight)


class Block(nn.Module):
    """Adds what attention finds, then what the MLP makes of it, to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = rms_norm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = rms_norm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,  # [R, T, C]
        mask: Tensor,  # [R, 1, T, T] bool
        turns: tuple[Tensor, Tensor],  # [T, D / 2] each
    ) -> Tensor:  # [R, T, C]
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, turns))
        output: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output


class Attention(nn.Module):
    """Mixes the positions that `mask` lets see each other."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = linear(config.width, 3 * config.width)
        self.output = linear(config.width, config.width, scale=config.branch_scale)

    def forward(self, x: Tensor, mask: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [R, T, 3, H, D]
        query, key, value = heads.transpose(1, 3).unbind(dim=2)  # [R, H, T, D] each
        query, key = turn(query, turns), turn(key, turns)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Transforms each position on its own: SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_and_value = linear(config.width, 2 * config.hidden_width)
        self.output = linear(config.hidden_width, config.width, scale=config.branch_scale)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        output: Tensor = self.output(F.silu(gate) * value)
        return output


def rms_norm(width: int) -> nn.RMSNorm:
    """Make a norm that is the same function in every precision.

    Left to torch, epsilon is that of the dtype: 8e-3 in bfloat16, which is 20 times the mean
    square of the embeddings, and 2e-16 in float64, where a check would judge another model.

    Args:
        width: Channels that are normalised together.
    """
    return nn.RMSNorm(width, eps=1e-6)


def linear(in_features: int, out_features: int, *, scale: float = 1.0) -> nn.Linear:
    """Make a linear map without bias whose first outputs have `scale` times the size of its inputs.

    Args:
        in_features: Channels that are read.
        out_features: Channels that are written.
        scale: Standard deviation of an output for inputs of variance 1.
    """
    module = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(module.weight, std=scale * in_features**-0.5)
    return module


def causal_document_mask(
    document_ids: Tensor,  # [R, T]
) -> Tensor:  # [R, 1, T, T] bool, true where the query (third) may see the key (last)
    """Let each position see itself and what precedes it in its document.

    Padding is one more document, so every position sees at least itself and no row of the
    attention weights is 0/0.

    Example:
        >>> causal_document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    same_document = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same_document.tril()


def rotary_turns(length: int, head_width: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine by which each pair of channels is turned at each position.

    Made anew in each forward: they are small, need no largest length, and are exact in float64.
    Angles are never made in less than float32, where positions above 256 would be rounded.

    Args:
        length: Number of positions T.
        head_width: Channels D of a head; even.
        like: Gives the device, and the dtype if it is wider than float32.

    Returns:
        Two tensors of shape [T, D / 2].
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    pairs = torch.arange(0, head_width, 2, dtype=dtype, device=like.device)
    frequencies = 10_000.0 ** (-pairs / head_width)
    positions = torch.arange(length, dtype=dtype, device=like.device)
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


def turn(
    heads: Tensor,  # [R, H, T, D]
    turns: tuple[Tensor, Tensor],  # [T, D / 2] each
) -> Tensor:  # [R, H, T, D], in the dtype of `heads`
    """Turn channel i together with channel i + D / 2, by an angle that grows with the position."""
    cosine, sine = turns
    first, second = heads.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.cat(turned, dim=-1).to(heads.dtype)
