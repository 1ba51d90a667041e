"""Scripts on frameworks, each a sound loop and one with a fault that only a run can show."""

import importlib.util
from pathlib import Path

import pytest
import watched

DATA = """
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
"""
ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
parts = model, optimizer, DataLoader(data, batch_size=4, shuffle=True), schedule
model, optimizer, loader, schedule = accelerator.prepare(*parts)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
)
FABRIC = (
    DATA
    + """
import lightning

fabric = lightning.Fabric(accelerator="cpu", devices=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
for i, (x, y) in enumerate(loader):
    is_last = (i + 1) % 4 == 0
    with fabric.no_backward_sync(model, enabled=not is_last):
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss / 4)
    if is_last:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
)
LIGHTNING = (
    DATA
    + """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

quiet = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
lightning.Trainer(
    max_epochs=1, accelerator="cpu", accumulate_grad_batches=4, gradient_clip_val=1.0, **quiet
).fit(Module(), DataLoader(data, batch_size=4))
"""
)
TRAINER = """
import warnings
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from transformers import Trainer, TrainingArguments
warnings.filterwarnings("ignore")
torch.manual_seed(0)
sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
bert = BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16)
sizes = dict(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
gpt2 = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(gpt2)
data = [
    {"input_ids": torch.randint(50, (12,)), "labels": torch.randint(50, (12,))} for _ in range(32)
]
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=4, use_cpu=True,
    num_train_epochs=1, report_to=[], save_strategy="no", disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=data).train()  # here
"""

CASES = {
    "accelerate": (
        ACCELERATE,
        ("accelerator.backward(loss)", "accelerator.backward(loss / 4)"),
        "MS102",
    ),
    "fabric": (
        FABRIC,
        ("fabric.backward(loss / 4)", "fabric.backward(loss)"),
        "MS103",
    ),
    "lightning": (
        LIGHTNING,
        ("cross_entropy(self.net(x), y)", "cross_entropy(self.net(x), y) / 4"),
        "MS102",
    ),
    # transformers#47688: a class of the library whose loss ignores the count that it is given.
    "transformers": (
        TRAINER,
        ("GPT2LMHeadModel(gpt2)", "BertForMaskedLM(bert)"),
        "MS103",
    ),
}
PACKAGES = {"fabric": "lightning"}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_on_a_framework_is_judged_like_any_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PACKAGES.get(name, name)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"`{package}` is not installed")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    sound, (right, wrong), code = CASES[name]
    assert right in sound
    assert watched.codes(watched.find_in(tmp_path / "sound.py", sound)) == []
    found = watched.find_in(tmp_path / "faulty.py", sound.replace(right, wrong))
    assert watched.codes(found) == [code]
