"""Set-ups that add up: the loss of a row does not depend on who shares its forward."""

import warnings
from collections.abc import Callable
from typing import Any

import setups as s
import torch
from setups import Setup
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import midstep as ms

SOUND: dict[str, Callable[[], Setup]] = {}


def sound(make: Callable[[], Setup]) -> Callable[[], Setup]:
    SOUND[make.__name__] = make
    return make


@sound
def perceptron_with_masked_targets() -> Setup:
    return Setup(s.mlp(), s.pairs(), s.summed, ms.targets())


@sound
def perceptron_with_adamw_and_clipping() -> Setup:
    optimizer = lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True)  # noqa: E731
    return Setup(s.mlp(), s.pairs(), s.summed, ms.targets(), optimizer, ms.ByGlobalNorm(0.05))


@sound
def sgd_with_momentum_that_has_stepped_and_clips_by_value() -> Setup:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for _ in range(2):
            s.summed(model, s.pairs()).backward()
            made.step()
            made.zero_grad()
        return made

    return Setup(s.mlp(), s.pairs(), s.summed, ms.targets(), optimizer, ms.ByValue(0.01))


@sound
def layer_norm() -> Setup:
    return Setup(s.mlp(nn.LayerNorm(8)), s.pairs(), s.summed, ms.targets())


@sound
def group_norm() -> Setup:
    model = s.ready(s.conv(nn.GroupNorm(2, 4)), s.images())
    return Setup(model, s.image_pairs(), s.summed, ms.targets())


@sound
def instance_norm() -> Setup:
    model = s.ready(s.conv(nn.InstanceNorm2d(4, affine=True)), s.images())
    return Setup(model, s.image_pairs(), s.summed, ms.targets())


@sound
def batch_norm_in_evaluation_mode() -> Setup:
    model = s.ready(s.conv(nn.BatchNorm2d(4)), s.images())
    return Setup(model.eval(), s.image_pairs(), s.summed, ms.targets())


@sound
def sync_batch_norm_in_evaluation_mode() -> Setup:
    model = s.ready(s.conv(nn.BatchNorm2d(4)), s.images())
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(model).eval()
    return Setup(synced, s.image_pairs(), s.summed, ms.targets())


@sound
def max_pooling_of_equal_patches() -> Setup:
    model = s.ready(s.conv(nn.MaxPool2d(2)), s.images())
    return Setup(model, s.image_pairs(), s.summed, ms.targets())


@sound
def dropout_in_evaluation_mode() -> Setup:
    return Setup(s.mlp(nn.Dropout(0.5)).eval(), s.pairs(), s.summed, ms.targets())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU], *, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        self.embed = nn.Embedding(20, s.WIDTH)
        self.rnn = kind(s.WIDTH, 8, num_layers=2, batch_first=first)
        self.out = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        hidden = self.rnn(x if self.first else x.transpose(0, 1))[0]
        return self.out(hidden if self.first else hidden.transpose(0, 1))


@sound
def lstm() -> Setup:
    batch = s.tokens(), s.token_labels()
    return Setup(Recurrent(nn.LSTM, first=True), batch, s.summed_tokens, ms.targets())


@sound
def gru_with_time_first_inside() -> Setup:
    batch = s.tokens(), s.token_labels()
    return Setup(Recurrent(nn.GRU, first=False), batch, s.summed_tokens, ms.targets())


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        return self.out(self.layers(self.embed(ids), src_key_padding_mask=padding))


def masked_encoder(dropout: float = 0.0) -> Setup:
    ids = s.tokens()
    padding = torch.arange(s.LENGTH) > (torch.arange(s.ROWS) % 4 + 1).unsqueeze(1)
    goal = ids.masked_fill(padding, -100)
    return Setup(
        Encoder(dropout),
        {"ids": ids, "padding": padding, "labels": goal},
        lambda model, b: ms.cross_entropy(model(b["ids"], b["padding"]), b["labels"]),
        ms.targets(key="labels"),
    )


@sound
def transformer_with_padding_and_tied_embeddings() -> Setup:
    return masked_encoder()


@sound
def language_model_with_shifted_labels() -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    count = ms.targets(shift=True, key=1)
    loss = lambda m, b: ms.cross_entropy(m(b[0]), b[1], shift=True)  # noqa: E731
    return Setup(model, (s.tokens(), s.token_labels()), loss, count)


@sound
def label_smoothing() -> Setup:
    loss = lambda m, b: ms.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)  # noqa: E731
    return Setup(s.mlp(), s.pairs(), loss, ms.targets())


@sound
def class_weights_in_float32() -> Setup:
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="sum")

    return Setup(s.mlp(), s.pairs(), loss, ms.targets(weight=weight))


@sound
def a_mean_taken_back_with_its_own_count() -> Setup:
    def loss(model: nn.Module, batch: Any) -> ms.LossSum:
        count = int((batch[1] != -100).sum())
        return ms.LossSum.from_mean(s.mean(model, batch), count)

    return Setup(s.mlp(), s.pairs(), loss, ms.targets())


@sound
def a_microbatch_that_counts_nothing_is_left_out() -> Setup:
    x, y = s.pairs()
    y[0] = -100  # the mean over this row alone is nan

    def loss(model: nn.Module, batch: Any) -> ms.LossSum:
        mean = s.mean(model, batch) + 0 * model(batch[0]).sum() / (batch[1] != -100).sum()
        return ms.LossSum.from_mean(mean, int((batch[1] != -100).sum()))

    return Setup(s.mlp(), (x, y), loss, ms.targets())


@sound
def losses_that_carry_their_counts() -> Setup:
    return Setup(s.mlp(), s.pairs(), lambda m, b: ms.cross_entropy(m(b[0]), b[1]))


@sound
def two_terms_with_denominators_of_their_own() -> Setup:
    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits = model(batch[0])
        lm = F.cross_entropy(logits, batch[1], reduction="sum")
        return {"lm": lm, "penalty": 0.1 * logits.logsumexp(1).square().sum()}

    count = lambda b: {"lm": int((b[1] != -100).sum()), "penalty": len(b[1])}  # noqa: E731
    return Setup(s.mlp(), s.pairs(), loss, count)


@sound
def regression_by_elements() -> Setup:
    loss = lambda m, b: (m(b[0]) - b[1]).square().sum()  # noqa: E731
    goal = torch.randn(s.ROWS, s.CLASSES, generator=s.seeded())
    return Setup(s.mlp(), (s.vectors(), goal), loss, ms.elements(key=1))


@sound
def sparse_embedding_gradients() -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(40, s.CLASSES))
    return Setup(model, (s.tokens(), s.labels()), s.summed, ms.targets())


@sound
def embedding_bag() -> Setup:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 8, padding_idx=0), nn.Linear(8, s.CLASSES))
    return Setup(model, (s.tokens(), s.labels()), s.summed, ms.targets())


@sound
def weight_norm() -> Setup:
    model = s.mlp()
    model[0] = nn.utils.parametrizations.weight_norm(model[0])
    return Setup(model, s.pairs(), s.summed, ms.targets())


@sound
def weight_norm_by_hooks() -> Setup:
    model = s.mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model[0] = nn.utils.weight_norm(model[0])
    return Setup(model, s.pairs(), s.summed, ms.targets())


@sound
def spectral_norm_in_evaluation_mode() -> Setup:
    model = s.mlp()
    model[0] = nn.utils.parametrizations.spectral_norm(model[0])
    return Setup(model.eval(), s.pairs(), s.summed, ms.targets())


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = s.mlp(nn.GELU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@sound
def recomputed_activations() -> Setup:
    return Setup(Recomputed(reentrant=False), s.pairs(), s.summed, ms.targets())


@sound
def recomputed_activations_by_reentrance() -> Setup:
    return Setup(Recomputed(reentrant=True), s.pairs(), s.summed, ms.targets())


class RootMeanSquare(nn.Module):
    """Computes in float32 whatever it is given, as many language models do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


@sound
def a_norm_that_insists_on_float32() -> Setup:
    return Setup(s.mlp(RootMeanSquare()), s.pairs(), s.summed, ms.targets())


class InsistsOnFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = s.mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[2](torch.tanh(x.float() @ self.inner[0].weight.T))


@sound
def a_model_that_does_not_run_in_float64() -> Setup:
    return Setup(InsistsOnFloat32(), s.pairs(), s.summed, ms.targets())


@sound
def bfloat16_weights() -> Setup:
    model = s.mlp().to(torch.bfloat16)
    return Setup(model, (s.vectors().bfloat16(), s.labels()), s.summed, ms.targets())


class Experts(nn.Module):
    """Each row goes to the expert that likes it best, whoever else is there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(s.WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(s.WIDTH, s.CLASSES) for _ in range(3))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        likes = self.gate(x).softmax(-1)
        return likes, likes.argmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        likes, chosen = self.routed(x)
        out = x.new_zeros(len(x), s.CLASSES)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * likes[rows, index].unsqueeze(-1))
        return out


@sound
def experts_that_route_each_row_by_itself() -> Setup:
    return Setup(Experts(), s.pairs(), s.summed, ms.targets())


@sound
def frozen_trunk() -> Setup:
    model = s.mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    return Setup(model, s.pairs(), s.summed, ms.targets())


@sound
def attention_of_torch() -> Setup:
    torch.manual_seed(0)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 20)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.out(self.attend(x, x, x, need_weights=False)[0])

    batch = s.tokens(), s.token_labels()
    return Setup(Attending(), batch, s.summed_tokens, ms.targets())


@sound
def a_loss_that_knows_the_model_by_another_name() -> Setup:
    model = s.mlp()
    loss = lambda _, b: F.cross_entropy(model(b[0]), b[1], reduction="sum")  # noqa: E731
    return Setup(model, s.pairs(), loss, ms.targets())


@sound
def captions_in_a_list() -> Setup:
    batch = {"x": s.vectors(), "captions": [str(i) for i in range(s.ROWS)], "y": s.full_labels()}
    loss = lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="sum")  # noqa: E731
    return Setup(s.mlp(), batch, loss, lambda b: len(b["captions"]))
