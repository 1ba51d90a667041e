"""The model of the language recipe: what each position may see, and in which precisions it runs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from midstep.recipes.corpus import (
    byte_frequency_baseline,
    held_out_loader,
    language_corpus,
    training_loader,
)
from midstep.recipes.gpt import GPT, Attention, GPTConfig, rotary_turns

SMALL = GPTConfig(width=32, depth=2, num_heads=2)
# Two documents and padding; the second is as long as the first without its last two.
DOCUMENT_IDS = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1]])
LENGTH = DOCUMENT_IDS.shape[1]


def model(config: GPTConfig = SMALL, *, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def exact(config: GPTConfig = SMALL) -> GPT:
    """In float64, and with embeddings of usual size, so that no effect drowns in rounding."""
    made = model(config).double()
    with torch.no_grad():
        made.embedding.weight.mul_(50)
    return made


def some_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def visible(document_ids: Tensor) -> Tensor:
    """By the definition: [i, j] is true where position i may see position j."""
    ids = document_ids[0].tolist()
    return torch.tensor(
        [[j <= i and ids[j] == ids[i] for j in range(len(ids))] for i in range(len(ids))]
    )


def with_shift(gpt: GPT, shift: Tensor, input_ids: Tensor) -> Tensor:
    """The logits when `shift` is added to the embeddings."""
    handle = gpt.embedding.register_forward_hook(lambda *call: call[-1] + shift)
    try:
        logits: Tensor = gpt(input_ids, DOCUMENT_IDS)
    finally:
        handle.remove()
    return logits


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("config", [GPTConfig(), SMALL, GPTConfig(width=128, depth=8)])
def test_an_untrained_model_is_nearly_uniform(config: GPTConfig) -> None:
    input_ids = some_bytes(4, 128)
    logits = model(config)(input_ids, torch.zeros_like(input_ids))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.15)


def test_a_later_byte_changes_no_earlier_logit() -> None:
    gpt, input_ids = exact(), some_bytes(1, LENGTH)
    one_document = torch.zeros_like(input_ids)
    before = gpt(input_ids, one_document)
    for position in range(LENGTH):
        changed = input_ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 256
        after = gpt(changed, one_document)
        assert torch.equal(after[:, :position], before[:, :position])
        assert (after[:, position:] != before[:, position:]).any(dim=-1).all()


@pytest.mark.parametrize("owner", [0, 1, -1])
def test_another_document_in_the_row_changes_no_logit(owner: int) -> None:
    gpt, input_ids = exact(), some_bytes(1, LENGTH)
    others = DOCUMENT_IDS.ne(owner)
    changed = torch.where(others, some_bytes(1, LENGTH, seed=1), input_ids)
    before, after = gpt(input_ids, DOCUMENT_IDS), gpt(changed, DOCUMENT_IDS)
    assert torch.equal(after[~others], before[~others])
    assert not torch.equal(after[others], before[others])


def test_a_logit_depends_on_exactly_the_positions_it_may_see() -> None:
    gpt, input_ids = exact(), some_bytes(1, LENGTH)
    shift = torch.zeros(1, LENGTH, SMALL.width, dtype=torch.float64, requires_grad=True)
    logits = with_shift(gpt, shift, input_ids)
    depends = torch.stack(
        [
            torch.autograd.grad(logits[0, i].square().sum(), shift, retain_graph=True)[0][0]
            .ne(0)
            .any(dim=-1)
            for i in range(LENGTH)
        ]
    )
    assert torch.equal(depends, visible(DOCUMENT_IDS))


def test_gradients_are_those_of_finite_differences() -> None:
    gpt, input_ids = exact(GPTConfig(width=8, depth=1, num_heads=2)), some_bytes(1, LENGTH)
    shift = torch.zeros(1, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: with_shift(gpt, x, input_ids)[..., :4], shift)


def test_a_document_is_predicted_alike_wherever_it_stands() -> None:
    gpt, input_ids = exact(), some_bytes(1, LENGTH)
    together = gpt(input_ids, DOCUMENT_IDS)
    for owner in (0, 1):
        own = DOCUMENT_IDS[0] == owner
        alone = gpt(input_ids[:, own], torch.zeros(1, int(own.sum()), dtype=torch.int64))
        torch.testing.assert_close(together[:, own], alone, rtol=1e-11, atol=1e-12)


def test_packed_documents_give_the_sum_of_their_gradients() -> None:
    gpt, input_ids = exact(), some_bytes(1, LENGTH)
    labels = input_ids.masked_fill(DOCUMENT_IDS == -1, -100)
    labels[0, [0, 6]] = -100
    together = torch.autograd.grad(
        loss_sum(gpt(input_ids, DOCUMENT_IDS), labels), list(gpt.parameters())
    )
    for owner in (0, 1):
        own = DOCUMENT_IDS[0] == owner
        logits = gpt(input_ids[:, own], torch.zeros(1, int(own.sum()), dtype=torch.int64))
        loss_sum(logits, input_ids[:, own]).backward()  # adds up in `.grad`
    for parameter, expected in zip(gpt.parameters(), together, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-11)


def test_padding_makes_no_nan() -> None:
    gpt, input_ids = model(), some_bytes(2, LENGTH)
    document_ids = torch.cat([DOCUMENT_IDS, torch.full_like(DOCUMENT_IDS, -1)])
    logits = gpt(input_ids, document_ids)
    logits.sum().backward()
    assert logits.isfinite().all()
    for parameter in gpt.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_attention_is_the_softmax_of_dot_products_of_turned_heads() -> None:
    # Rotary positions by their definition: pair i of the channels is a complex number that is
    # multiplied by exp(1j * position * 10000 ** (-2 i / D)).
    attention = Attention(SMALL).double()
    x = torch.randn(1, LENGTH, 32, dtype=torch.float64)
    heads = F.linear(x, attention.query_key_value.weight).reshape(LENGTH, 3, 2, 16)
    mixed = torch.empty(LENGTH, 2, 16, dtype=torch.float64)
    frequencies = 10_000.0 ** (-2 * torch.arange(8, dtype=torch.float64) / 16)
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequencies
    for head in range(2):
        query, key = (
            torch.complex(heads[:, part, head, :8], heads[:, part, head, 8:])
            * torch.polar(torch.ones_like(angles), angles)
            for part in (0, 1)
        )
        scores = (query @ key.mH).real / 4  # the root of 16 channels
        weights = scores.masked_fill(~visible(DOCUMENT_IDS), -math.inf).softmax(dim=-1)
        mixed[:, head] = weights @ heads[:, 2, head]
    expected = F.linear(mixed.flatten(1), attention.output.weight)
    turns = rotary_turns(LENGTH, SMALL.head_width, like=x)
    found = attention(x, visible(DOCUMENT_IDS)[None, None], turns)[0]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_the_same_in_fewer_bits(dtype: torch.dtype) -> None:
    gpt, input_ids = model(), some_bytes(1, LENGTH)
    expected = gpt(input_ids, DOCUMENT_IDS)
    with torch.autocast("cpu", dtype=dtype):
        logits = gpt(input_ids, DOCUMENT_IDS)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.02)
    logits.float().square().sum().backward()
    for parameter in gpt.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype_computes_in_it(dtype: torch.dtype) -> None:
    input_ids = some_bytes(1, LENGTH)
    expected = model()(input_ids, DOCUMENT_IDS)
    logits = model().to(dtype)(input_ids, DOCUMENT_IDS)
    assert logits.dtype == dtype
    error = 1e-5 if dtype == torch.float64 else 0.02
    torch.testing.assert_close(logits.float(), expected, rtol=error, atol=error)


def test_positions_beyond_256_are_told_apart_in_bfloat16() -> None:
    like = torch.zeros(1, dtype=torch.bfloat16)
    cosine, _ = rotary_turns(1024, 16, like=like)
    expected, _ = rotary_turns(1024, 16, like=like.double())
    torch.testing.assert_close(cosine.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_a_compiled_model_computes_the_same() -> None:
    gpt, input_ids = model(), some_bytes(2, LENGTH)
    document_ids = DOCUMENT_IDS.expand(2, -1)
    compiled = torch.compile(gpt, fullgraph=True, backend="aot_eager")
    for found, expected in (
        (compiled(input_ids, document_ids), gpt(input_ids, document_ids)),
        (
            torch.autograd.grad(compiled(input_ids, document_ids).square().sum(), gpt.norm.weight),
            torch.autograd.grad(gpt(input_ids, document_ids).square().sum(), gpt.norm.weight),
        ),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_number_of_parameters_is_the_closed_form() -> None:
    config = GPTConfig(vocab_size=100, width=48, depth=3, num_heads=4)
    mlp = 3 * 48 * 128  # 8/3 of 48 is 128
    attention = 4 * 48 * 48
    expected = 100 * 48 + 3 * (attention + mlp + 2 * 48) + 48  # the embeddings count once
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == expected


def test_embeddings_learn_as_inputs_and_as_outputs() -> None:
    gpt = exact()
    gpt(torch.tensor([[1, 2]]), torch.zeros(1, 2, dtype=torch.int64))[..., 7].sum().backward()
    assert gpt.embedding.weight.grad is not None
    touched = gpt.embedding.weight.grad.ne(0).any(dim=-1).nonzero().flatten()
    assert touched.tolist() == [1, 2, 7]


def test_the_residual_stream_starts_about_equally_large_at_any_depth() -> None:
    def size(depth: int) -> float:
        sizes: list[float] = []
        gpt = model(GPTConfig(width=64, depth=depth))
        gpt.norm.register_forward_pre_hook(lambda *call: sizes.append(call[1][0].std().item()))
        gpt(some_bytes(4, 64), torch.zeros(4, 64, dtype=torch.int64))
        return sizes[0]

    assert 0.5 * size(2) < size(32) < 2 * size(2)


def test_dropout_acts_in_training_only() -> None:
    gpt = model(GPTConfig(width=32, depth=1, num_heads=2, dropout=0.5))
    batch = some_bytes(1, LENGTH), DOCUMENT_IDS
    assert not torch.equal(gpt(*batch), gpt(*batch))
    gpt.eval()
    assert torch.equal(gpt(*batch), gpt(*batch))


def test_the_embeddings_and_both_branches_of_a_block_are_dropped() -> None:
    gpt = model(GPTConfig(width=32, depth=1, num_heads=2, dropout=0.5))
    shares: list[float] = []
    for module in gpt.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda *call: shares.append(call[2].eq(0).double().mean().item())
            )
    gpt(some_bytes(4, 64), torch.zeros(4, 64, dtype=torch.int64))
    assert shares == pytest.approx([0.5] * 3, abs=0.05)


def test_by_default_nothing_is_dropped() -> None:
    gpt, batch = model(), (some_bytes(1, LENGTH), DOCUMENT_IDS)
    assert torch.equal(gpt(*batch), gpt.eval()(*batch))


def test_a_seed_fixes_the_first_weights() -> None:
    ours, same, other = (model(seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(ours[name], same[name]) for name in ours)
    assert not torch.equal(ours["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size=0"),
        ({"width": 0}, r"width=0"),
        ({"depth": -1}, r"depth=-1"),
        ({"num_heads": 0}, r"num_heads=0"),
        ({"width": 36, "num_heads": 4}, r"width=36, num_heads=4.*`2 \* num_heads` = 8"),
        ({"dropout": 1.0}, r"dropout=1.0"),
        ({"dropout": -0.1}, r"dropout=-0.1"),
        ({"dropout": math.nan}, r"dropout=nan"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_few_updates_of_a_plain_loop_beat_byte_frequencies() -> None:
    corpus = language_corpus(context=64)
    gpt = model(GPTConfig(width=32, depth=1, num_heads=2))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for _, batch in zip(range(120), training_loader(corpus.train, rows=16, seed=0), strict=False):
        logits = gpt(batch["input_ids"], batch["document_ids"])
        (loss_sum(logits, batch["labels"]) / (batch["labels"] != -100).sum()).backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        total = sum(
            loss_sum(gpt(batch["input_ids"], batch["document_ids"]), batch["labels"]).item()
            for batch in held_out_loader(corpus.held_out, rows=64)
        )
    loss_mean = total / int((corpus.held_out.labels != -100).sum())
    assert loss_mean < byte_frequency_baseline(*corpus) - 0.3
