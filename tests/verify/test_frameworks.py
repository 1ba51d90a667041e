"""Models of transformers and timm, where they are installed: sound ones and faulty ones."""

from collections.abc import Callable
from typing import Any

import pytest
import setups as s
import torch
from setups import Setup
from torch import Tensor, nn

import midstep as ms

IDS = torch.randint(3, 60, (8, 7), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(7) < torch.tensor([7, 5, 6, 3, 7, 4, 2, 6]).unsqueeze(1)).long()


def transformers() -> Any:
    return pytest.importorskip("transformers", exc_type=ImportError)


def small(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        **more,
    }


def causal(model: nn.Module) -> Setup:
    """A language model as transformers trains it: logits shifted by the loss, padding ignored."""
    batch = {
        "input_ids": IDS,
        "attention_mask": MASK,
        "labels": IDS.masked_fill(MASK == 0, -100),
    }

    def loss(model: nn.Module, b: dict[str, Tensor]) -> ms.LossSum:
        out = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"])
        return ms.cross_entropy(out.logits, b["labels"], shift=True)

    return Setup(model, batch, loss, ms.targets(key="labels", shift=True))


def own_mean(setup: Setup) -> Setup:
    """The same model by its own loss, a mean, taken back with a count."""
    setup.loss = lambda m, b: ms.LossSum.from_mean(
        m(**b).loss, int((b["labels"][:, 1:] != -100).sum())
    )
    return setup


def gpt2(**more: Any) -> nn.Module:
    t = transformers()
    torch.manual_seed(0)
    config = t.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=16, **more)
    return t.GPT2LMHeadModel(config).train()


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def llama() -> nn.Module:
    t = transformers()
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**small(num_key_value_heads=1))).train()


def bert() -> Setup:
    t = transformers()
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = t.BertForSequenceClassification(t.BertConfig(**small(num_labels=3, **dropout))).train()
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.arange(8) % 3}
    loss = lambda m, b: ms.LossSum.from_mean(m(**b).loss, len(b["labels"]))  # noqa: E731
    return Setup(model, batch, loss, ms.rows())


def t5() -> Setup:
    t = transformers()
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = t.T5Config(vocab_size=60, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    model = t.T5ForConditionalGeneration(config).train()
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100)}
    loss = lambda m, b: ms.cross_entropy(m(**b).logits, b["labels"])  # noqa: E731
    return Setup(model, batch, loss, ms.targets(key="labels"))


def mixtral(coefficient: float) -> Setup:
    t = transformers()
    torch.manual_seed(0)
    config = t.MixtralConfig(
        **small(num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    return own_mean(causal(t.MixtralForCausalLM(config).train()))


def timm(name: str, **more: Any) -> Setup:
    made = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    model = made.create_model(name, num_classes=s.CLASSES, **more).train()
    x = torch.randn(6, 3, 32, 32, generator=s.seeded())
    y = torch.randint(s.CLASSES, (6,), generator=s.seeded())
    return Setup(model, (x, y), s.summed, ms.targets())


VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2}

SOUND: dict[str, Callable[[], Setup]] = {
    "gpt2": lambda: causal(gpt2(**NO_DROPOUT)),
    "gpt2 by its own loss": lambda: own_mean(causal(gpt2(**NO_DROPOUT))),
    "llama": lambda: causal(llama()),
    "bert": bert,
    "t5": t5,
    "mixtral without its balance": lambda: mixtral(0.0),
    "vit": lambda: timm("vit_tiny_patch16_224", **VIT),
    "convnext": lambda: timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
}

FAULTS: dict[str, tuple[Callable[[], Setup], str, str]] = {
    "gpt2 with dropout": (lambda: causal(gpt2()), "draws", "which is equal"),
    "mixtral with its balance": (
        lambda: mixtral(0.1),
        "loss",
        "tokens_per_expert * router_prob_per_expert",
    ),
    "resnet": (lambda: timm("resnet10t"), "layers", "`bn1` (BatchNorm"),
    "vit with stochastic depth": (
        lambda: timm("vit_tiny_patch16_224", drop_path_rate=0.5, **VIT),
        "draws",
        "which is equal",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_is_certified(name: str) -> None:
    certificate = SOUND[name]().verify()
    assert certificate.equal, str(certificate)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_cause(name: str) -> None:
    make, kind, words = FAULTS[name]
    certificate = make().verify()
    assert certificate.reasons, str(certificate)
    assert certificate.reasons[0].kind == kind, str(certificate)
    assert words in certificate.reasons[0].what + certificate.reasons[0].why, str(certificate)


def test_the_models_own_loss_ignores_masked_targets_that_rows_would_count() -> None:
    setup = causal(gpt2(**NO_DROPOUT))
    setup.loss = lambda m, b: ms.LossSum.from_mean(m(**b).loss, len(b["labels"]))
    setup.count = None
    (reason,) = setup.verify().reasons
    assert reason.kind == "count"
    assert "`labels` that are not -100, without the first of each row" in reason.what
