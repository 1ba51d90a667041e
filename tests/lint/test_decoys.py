"""What looks wrong and is right: none of these may raise an error or a warning."""

from pathlib import Path

import pytest

from midstep.defects import SETUP, Level
from midstep.lint import Source, lint, read

SCRIPTS = sorted((Path(__file__).parents[1] / "auditing" / "decoys").glob("*.py"))

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

LIGHTNING = """
import lightning as L


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        sched_g, sched_d = self.lr_schedulers()
        loss_d = self.critic(batch).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        if batch_idx % 5 == 0:
            loss_g = self.critic(self.generator(batch)).mean()
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
        sched_g.step()
        sched_d.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(
            self.critic.parameters()
        )
"""

WGAN = """
critic = nn.Linear(3, 1)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=1e-4)
for i, (x, y) in enumerate(loader):
    optimizer_c.zero_grad()
    loss_c = critic(model(x).detach()).mean()
    loss_c.backward()
    optimizer_c.step()
    for p in critic.parameters():
        p.data.clamp_(-0.01, 0.01)
    if i % 5 == 0:
        optimizer.zero_grad()
        loss_g = -critic(model(x)).mean()
        loss_g.backward()
        optimizer.step()
"""

TWO_BACKWARDS = """
for x, y in loader:
    optimizer.zero_grad()
    real = F.cross_entropy(model(x), y)
    real.backward()
    fake = F.cross_entropy(model(-x), y)
    fake.backward()
    optimizer.step()
"""

TIMM = """
def train_one_epoch(model, loader, optimizer, loss_fn, args, lr_scheduler=None, loss_scaler=None):
    second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
    accum_steps = args.grad_accum_steps
    last_accum_steps = len(loader) % accum_steps
    updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
    num_updates = 0
    last_batch_idx = len(loader) - 1
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        last_batch = batch_idx == last_batch_idx
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps

        def _forward():
            loss = loss_fn(model(input), target)
            if accum_steps > 1:
                loss /= accum_steps
            return loss

        def _backward(_loss):
            if loss_scaler is not None:
                loss_scaler(_loss, optimizer, clip_grad=args.clip_grad, need_update=need_update)
            else:
                _loss.backward(create_graph=second_order)
                if need_update:
                    optimizer.step()

        loss = _forward()
        _backward(loss)
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        if lr_scheduler is not None:
            lr_scheduler.step_update(num_updates=num_updates, metric=0)
"""

NANOGPT = """
scaler = torch.amp.GradScaler("cpu", enabled=False)
gradient_accumulation_steps, grad_clip, iter_num = 4, 1.0, 0
x, y = loader[0]
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.1
    for micro_step in range(gradient_accumulation_steps):
        loss = F.cross_entropy(model(x), y)
        loss = loss / gradient_accumulation_steps
        x, y = loader[micro_step]
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > 5:
        break
"""

PPO = """
clip_coef, total_loss = 0.2, 0.0
for update in range(4):
    for epoch in range(3):
        for x, y in loader:
            ratio = model(x).softmax(-1)[:, 0]
            clipped = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
            loss = -torch.min(ratio, clipped).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            total_loss += loss.detach()
"""

SKIPS = """
scaler = torch.amp.GradScaler("cpu")
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scale_before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer_was_run = scale_before <= scaler.get_scale()
    if optimizer_was_run:
        scheduler.step()
"""

BRANCHES = """
use_amp = len(loader) > 3
scaler = torch.amp.GradScaler("cpu") if use_amp else None
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""

WORLD = """
def train(model, loader, optimizer, world_size, accum):
    for step, (x, y) in enumerate(loader):
        model.require_backward_grad_sync = (step + 1) % accum == 0
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss = loss * world_size / (accum * 64)
        loss.backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
"""

COUNTER = """
accumulation_steps, global_step = 4, 0
for epoch in range(3):
    for x, y in loader:
        global_step += 1
        (F.cross_entropy(model(x), y) / accumulation_steps).backward()
        if global_step % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

EMA = """
ema = nn.Linear(4, 3)


def accumulate(target, source, decay=0.99):
    for p, q in zip(target.parameters(), source.parameters()):
        p.data.mul_(decay).add_(q.data, alpha=1 - decay)


for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if i % 2 == 0:
        accumulate(ema, model)
"""

PENALTY = """
for i, (x, y) in enumerate(loader):
    x.requires_grad_(True)
    logits = model(x)
    gradient = torch.autograd.grad(logits.sum(), x, create_graph=True)[0]
    loss = F.cross_entropy(logits, y) + 10 * (gradient.norm(2, dim=1) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

EVERY_N_LOG = """
running = 0.0
for i, (x, y) in enumerate(loader):
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    running += loss.item()
    if i % 100 == 0:
        print(running / 100)
        running = 0.0
"""

GENERIC = """
class Trainer:
    def __init__(self, config, model, optimizer, scheduler):
        self.config, self.model, self.optimizer = config, model, optimizer
        self.scheduler = scheduler

    def optimize_parameters(self, loss, sync=True):
        self.strategy.backward(loss)
        if sync:
            self.strategy.step(self.optimizer)

    def fit(self, loader):
        for i, (x, y) in enumerate(loader):
            self.optimize_parameters(self.model(x), sync=(i + 1) % self.config.k == 0)
"""

TASKS = """
tasks = [loader[:5], loader[5:]]
for step in range(3):
    optimizer.zero_grad()
    for task in tasks:
        x, y = task[step]
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

ADVERSARIAL = """
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()
"""

SAM = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.first_step(zero_grad=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.second_step(zero_grad=True)
"""

LAST_DIVISOR = """
k = 4
full = len(loader) // k * k
for i, (x, y) in enumerate(loader):
    divisor = k if i < full else len(loader) - full
    (F.cross_entropy(model(x), y) / divisor).backward()
    if (i + 1) % k == 0 or i == len(loader) - 1:
        optimizer.step()
        optimizer.zero_grad()
"""

SUM_ON_PURPOSE = """
k = 5
for i, (x, y) in enumerate(loader):
    F.cross_entropy(model(x), y, reduction="sum").backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
"""

ENVIRONMENT = """
def run(env, agent, steps):
    state = env.reset()
    for t in range(steps):
        state, reward, done, _ = env.step(agent.act(state))
        if t % 4 == 0:
            agent.learn()
        if done:
            state = env.reset()
"""

MEASURED = """
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf")) / scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
"""

STREAM = """
def sampler():
    while True:
        yield from loader


k = 4
batches = sampler()
for step in range(10):
    optimizer.zero_grad()
    for _ in range(k):
        x, y = next(batches)
        (F.cross_entropy(model(x), y) / k).backward()
    optimizer.step()
"""

DEEPSPEED = """
def train(model_engine, loader):
    for x, y in loader:
        loss = F.cross_entropy(model_engine(x), y)
        model_engine.backward(loss)
        model_engine.step()
"""

DECOYS = {
    name.lower(): text
    for name, text in list(globals().items())
    if name.isupper() and isinstance(text, str) and name != "SETUP"
}


@pytest.mark.parametrize("name", DECOYS)
def test_a_loop_that_is_right_raises_nothing(name: str) -> None:
    findings = lint(Source(f"{name}.py", SETUP + DECOYS[name])).findings
    assert [f for f in findings if f.level is not Level.ADVICE] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_that_is_run_without_a_finding_is_read_without_one(path: Path) -> None:
    findings = lint(read(path)).findings
    assert [f for f in findings if f.level is not Level.ADVICE] == []


def test_there_are_decoys() -> None:
    assert len(DECOYS) >= 24
