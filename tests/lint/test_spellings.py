"""Spellings as people write them, mostly functions whose callers are elsewhere: one defect each."""

import pytest

from midstep.defects import Level
from midstep.lint import Source, lint

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast
"""

SPELLINGS = {
    "MS104 func params": """
def train_one_epoch(model, criterion, data_loader, optimizer, device, epoch, args):
    optimizer.zero_grad()
    num_batches = len(data_loader)
    for idx, (samples, targets) in enumerate(data_loader):
        outputs = model(samples)
        loss = criterion(outputs, targets)
        loss = loss / args.accum_iter
        loss.backward()
        if (idx + 1) % args.accum_iter == 0 or (idx + 1) == num_batches:
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS110 args": """
class Trainer:
    def __init__(self, model, cfg):
        self.model = model
        self.cfg = cfg
        self.optim = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    def train_epoch(self, loader):
        for it, batch in enumerate(loader):
            self.optim.zero_grad()
            loss = self.model(batch).loss / self.cfg.grad_accum
            loss.backward()
            if (it + 1) % self.cfg.grad_accum == 0:
                self.optim.step()
""",
    "MS202 self": """
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = GradScaler()
    def step(self, batch):
        self.optimizer.zero_grad()
        with autocast():
            loss = self.model(batch)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
""",
    "MS403 fn params": """
def train(model, loader, optimizer, scheduler, scaler, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
""",
    "MS103 criterion": """
def train(model, loader, optimizer, criterion, accumulation_steps=8):
    model.train()
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS402 params": """
def train(model, loader, optimizer, scheduler, criterion, k):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / k
        loss.backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
""",
    "MS204 params": """
def train(model, loader, optimizer, criterion):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
""",
    "MS109 params": """
def train(model, loader, optimizer, criterion):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    "MS108 params": """
def train(model, loader, optimizer, gradient_accumulations):
    for batch_i, (imgs, targets) in enumerate(loader):
        loss, outputs = model(imgs, targets)
        loss.backward()
        if batch_i % gradient_accumulations:
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS107 dllm": """
def train(model, loader, optimizer, args):
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss / args.gradient_accumulation_steps
        loss.backward()
        if (step + 1) % args.gradient_accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS303 espnet": """
def train(model, loader, optimizer, scaler):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if not torch.isfinite(grad_norm):
            print("skip")
        else:
            scaler.step(optimizer)
            scaler.update()
""",
    "MS605 nan window": """
def train(model, loader, optimizer, accum_grad):
    for i, batch in enumerate(loader):
        loss = model(batch) / accum_grad
        loss.backward()
        if (i + 1) % accum_grad == 0:
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            if torch.isfinite(grad_norm):
                optimizer.step()
                optimizer.zero_grad()
""",
    "MS803 total": """
def train(model, loader, optimizer, criterion):
    total_loss = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total_loss += loss
    return total_loss / len(loader)
""",
    "MS304 neosr": """
class Model:
    def optimize(self, lq, gt):
        self.optimizer_g.zero_grad()
        l_g = self.cri(self.net_g(lq), gt)
        self.gradscaler.scale(l_g).backward()
        self.gradscaler.step(self.optimizer_g)
        self.gradscaler.update()
        self.gradscaler.step(self.optimizer_d)
        self.gradscaler.update()
""",
    "MS305 half": """
def main(loader):
    model = nn.Linear(4, 4).to("cuda", torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters())
    for i, x in enumerate(loader):
        (model(x).mean() / 8).backward()
        if (i + 1) % 8 == 0:
            opt.step(); opt.zero_grad()
""",
    "MS207 chain": """
import itertools
def main(loader, a, b):
    params = itertools.chain(a.parameters(), b.parameters())
    opt = torch.optim.Adam(params, lr=1e-4)
    for x in loader:
        opt.zero_grad()
        a(b(x)).mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
""",
    "MS201 accelerate": """
from accelerate import Accelerator
def main(args, model, optimizer, loader, scheduler):
    accelerator = Accelerator(gradient_accumulation_steps=args.k)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS405 cosine": """
def main(args, model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
""",
    "MS101 masked fn": """
def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()
def train(model, loader, optimizer, accumulation_steps):
    for i, batch in enumerate(loader):
        logits = model(batch["ids"]).transpose(1, 2)
        per_token = F.cross_entropy(logits, batch["labels"], reduction="none")
        loss = masked_mean(per_token, batch["mask"]) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS505 funasr": """
from contextlib import nullcontext
def train(model, loader, optimizer, accum_grad):
    for batch_idx, batch in enumerate(loader):
        my_context = model.no_sync if batch_idx % accum_grad != 0 else nullcontext
        with my_context():
            loss = model(batch) / accum_grad
            loss.backward()
        if (batch_idx + 1) % accum_grad == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS505 always": """
def train(model, loader, optimizer):
    for batch in loader:
        optimizer.zero_grad()
        with model.no_sync():
            loss = model(batch)
            loss.backward()
        optimizer.step()
""",
    "MS503 fn": """
from torch.nn.parallel import DistributedDataParallel as DDP
def train(net, loader, rank):
    model = DDP(net, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        out = model(x)
        loss = F.mse_loss(out, y) / 4
        if (i + 1) % 4 == 0:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                loss.backward()
""",
    "MS604 nan": """
def train(model, loader, optimizer):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).mean().backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                torch.nan_to_num_(param.grad, nan=0.0, posinf=0.0, neginf=0.0)
        optimizer.step()
""",
    "MS205 backward": """
def train(model, loader, optimizer, criterion, args):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        loss.backward()
        optimizer.step()
""",
    "MS111 between": """
def train(model, loader, optimizer, criterion, args):
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.zero_grad()
        optimizer.step()
""",
    "MS302 update": """
def train(model, loader, optimizer, scaler, k):
    for i, x in enumerate(loader):
        loss = model(x) / k
        scaler.scale(loss).backward()
        if (i + 1) % k == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
""",
    "MS102 hf acc": """
from accelerate import Accelerator
def main(model, optimizer, loader):
    gradient_accumulation_steps = 4
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            loss = loss / gradient_accumulation_steps
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS112 ungated": """
def train(model, loader, optimizer, criterion, accumulation_steps):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) / accumulation_steps
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (i + 1) % accumulation_steps == 0:
            print("update")
""",
    "MS401 epoch": """
def main(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    for epoch in range(epochs):
        scheduler.step()
        train(model, loader, optimizer)
def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "MS206 heads": """
def main(loader, encoder, decoder):
    opt = torch.optim.Adam(list(encoder.parameters()) + list(decoder.parameters()), lr=1e-3)
    for x in loader:
        opt.zero_grad()
        decoder(encoder(x)).mean().backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        opt.step()
""",
    "MS703 head": """
import torchvision
def main(loader):
    model = torchvision.models.resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.fc = nn.Linear(512, 10)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "MS209 log": """
def train(model, loader, optimizer, writer):
    for i, x in enumerate(loader):
        optimizer.zero_grad()
        model(x).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms = [p.grad.detach().norm(2) for p in model.parameters()]
        total_norm = torch.norm(torch.stack(norms), 2)
        writer.add_scalar("grad_norm", total_norm, i)
        optimizer.step()
""",
    "MS706 sched": """
def save(model, optimizer, epoch, path):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
def main(model, loader, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    if args.resume:
        ckpt = torch.load(args.resume)
        model.load_state_dict(ckpt["model"])
        optimizer.load_state_dict(ckpt["optimizer"])
    for epoch in range(100):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        lr_scheduler.step()
        save(model, optimizer, epoch, "x.pt")
""",
    "MS301 micro": """
def train(model, loader, optimizer, scaler, k):
    for i, x in enumerate(loader):
        scaler.scale(model(x) / k).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (i + 1) % k == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    "MS114 clip": """
def train(img, txt, loader, optimizer, accum_freq):
    for i, (a, b) in enumerate(loader):
        za, zb = img(a), txt(b)
        logits = za @ zb.t()
        targets = torch.arange(logits.shape[0]).to(a.device)
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)) / 2
        (loss / accum_freq).backward()
        if (i + 1) % accum_freq == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "MS102 twice": """
def train(model, loader, optimizer, criterion, accum):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        loss = loss / accum
        if (i + 1) % accum == 0:
            (loss / accum).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            (loss / accum).backward()
""",
    "MS104 flush": """
def train(model, loader, optimizer, criterion, accum):
    optimizer.zero_grad()
    step = 0
    for x, y in loader:
        loss = criterion(model(x), y) / accum
        loss.backward()
        step += 1
        if step % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
    if step % accum:
        optimizer.step()
        optimizer.zero_grad()
""",
    "MS207 method": """
class Trainer:
    def __init__(self, model):
        self.model = model
        self.params = filter(lambda p: p.requires_grad, model.parameters())
        self.opt = torch.optim.Adam(self.params, lr=1e-4)
    def step(self, x):
        self.opt.zero_grad()
        self.model(x).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.opt.step()
""",
    "MS107 unknown length": """
def train(model, loader, optimizer, k):
    for i, batch in enumerate(loader):
        loss = model(**batch).loss / k
        loss.backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
}
# What is unscaled with every microbatch is clipped so, too.
ALSO = {"MS301 micro": {"MS201"}}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_understood(name: str) -> None:
    code = name[:5]
    found = {
        finding.defect.code
        for finding in lint(Source("train.py", HEAD + SPELLINGS[name])).findings
        if finding.level is not Level.ADVICE or finding.defect.code == code
    }
    assert found == {code} | ALSO.get(name, set())
