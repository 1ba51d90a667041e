"""Loops as public scripts write them, which read like a defect and are none."""

import pytest

from midstep.defects import SETUP, Level
from midstep.lint import Source, lint

REPLAY = """
memory, every = [], 4
for t in range(1000):
    memory.append(env.act())
    if t > 100:
        if t % every == 0:
            x, y = draw(memory)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        if t % 50 == 0:
            target.load_state_dict(model.state_dict())
"""

TWO_RHYTHMS = """
class Slow(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= 0.1 * p.grad


body, head = nn.Linear(4, 4), nn.Linear(4, 1)
both = [Slow(body.parameters()), Slow(head.parameters())]
for step in range(100):
    x, y = next(batches)
    F.mse_loss(head(body(x)), y, reduction="sum").backward()
    if step % 2 == 0:
        both[1].step()
        both[1].zero_grad()
    else:
        for opt in both:
            opt.step()
        body.zero_grad()
        head.zero_grad()
"""

ONE_OF_SEVERAL = """
def train(net, batches, optimizers):
    for step in range(100):
        x, y = next(batches)
        F.mse_loss(net(x), y, reduction="sum").backward()
        if step % 2 == 0:
            optimizers[1].step()
            optimizers[1].zero_grad()
        else:
            for opt in optimizers:
                opt.step()
            net.zero_grad()
"""

OWN_SCHEDULE = """
from warmups import WarmUpFromTheStepOfTheOptimizer

scheduler = WarmUpFromTheStepOfTheOptimizer(optimizer, 100)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    scheduler.step()
    optimizer.step()
    optimizer.zero_grad()
"""

MEAN_OF_EACH_ROW = """
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for x, mask in loader:
    each = model(x)
    loss = ((each * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

COUNTED_BEFORE = """
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
k, done = 4, 0
for x, y in loader:
    if done == 0:
        optimizer.zero_grad()
    if many and done + 1 < k:
        context = model.no_sync()
    else:
        context = nothing()
    with context:
        loss = F.cross_entropy(model(x), y) / k
        done += 1
        loss.backward()
    if done % k == 0:
        optimizer.step()
        done = 0
"""

ONE_AFTER_ANOTHER = """
model(torch.ones(4)).sum().backward()

opt = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))


def warm():
    opt.step()


for _ in range(5):
    warm()

opt = torch.optim.Adam(model.parameters(), lr=0.01)


def warm():
    opt.step()


for _ in range(5):
    warm()
"""

SPLIT_BY_IDENTITY = """
head = list(map(id, model.head.parameters()))
others = filter(lambda p: id(p) not in head, model.parameters())
optimizer = torch.optim.AdamW([{"params": model.head.parameters()}, {"params": others}])
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

COUNT_OF_TARGETS = """
class Recipe:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def train(self, loader, k):
        total, targets = 0.0, 0
        for i, batch in enumerate(loader):
            count = (batch["labels"] != -100).sum()
            targets += count
            loss = self.model.mean_loss(batch) * count
            total += loss.detach()
            loss.backward()
            if (i + 1) % k == 0:
                scale_gradients(self.model, 1 / targets)
                self.optimizer.step()
                self.optimizer.zero_grad()
                total, targets = 0.0, 0
"""

WITHOUT_A_GRAPH = """
total = torch.zeros(2)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        total[0] += loss * len(x)
        total[1] += len(x)
"""

NOTHING_DROPPED = """
from torch.utils.checkpoint import checkpoint


def attend(q, dropout_p=0.0):
    assert dropout_p == 0.0
    return q


for x, y in loader:
    loss = F.cross_entropy(checkpoint(model, attend(x), preserve_rng_state=False), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CACHED_OR_NOT = """
def one_pass(model, optimizer, scaler, loader, kept):
    if args.keep:
        batches = kept
        if not kept:
            for i, batch in enumerate(loader):
                kept.append((i, batch))
        else:
            random.shuffle(kept)
    else:
        batches = enumerate(loader)
    for i, (x, y) in batches:
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


scaler = torch.amp.GradScaler("cpu")
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
kept = []
for epoch in range(3):
    one_pass(model, optimizer, scaler, loader, kept)
    scheduler.step()
"""

PLAYED_AGAIN = """
def once():
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


for _ in range(3):
    optimizer.zero_grad(set_to_none=False)
    once()
    optimizer.step()
optimizer.zero_grad(set_to_none=False)
recorded = torch.cuda.CUDAGraph()
with torch.cuda.graph(recorded):
    loss = once()
for _ in range(8):
    optimizer.zero_grad(set_to_none=False)
    recorded.replay()
    optimizer.step()
"""

BOTH_WAYS = """
class Two:
    def training_step(self, batch):
        total = 0.0
        for name in batch.keys():
            part = 0
            if torch.isfinite(self.a(batch[name])):
                part += F.mse_loss(self.net(batch[name]), batch[name])
            total += part
            if not self.together:
                self.opt.zero_grad()
                self.manual_backward(part)
                self.opt.step()
        if self.together:
            self.opt.zero_grad()
            self.manual_backward(total)
            self.opt.step()
"""

TICKS_ALONE = """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
model(torch.zeros(1)).sum().backward()
optimizer.step()
rates = [0.1]
for _ in range(29):
    scheduler.step()
    rates.append(optimizer.param_groups[0]["lr"])
with pytest.raises(IndexError):
    scheduler.step()
"""

ELSEWHERE_WITHOUT = """
class Tests:
    def test_with_a_scale(self):
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    def test_saved(self):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        stream = io.BytesIO()
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, stream)
        state = torch.load(io.BytesIO(stream.getvalue()))
        other_optimizer.load_state_dict(state["optim"])
"""

LENGTH_ELSEWHERE = """
from recipe import get_scheduler, get_optimizer

def run(loader, optimizer, scheduler, cfg, done):
    for _ in progress:
        x, y = next(loader)
        done += 1
        F.mse_loss(model(x), y, reduction="sum").backward()
        if done % cfg.grad_accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()

scheduler = get_scheduler(cfg, optimizer, len(rows))
optimizer.zero_grad()
for epoch in range(3):
    run(loader, optimizer, scheduler, cfg, 0)
"""

TICKS_FIRST_BY_DESIGN = """
from rates import RateOfThisStep


def one_pass(loader, model, optimizer, schedule):
    for x, y in loader:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        if schedule is not None:
            schedule.step()
        optimizer.step()


def main(args):
    schedule = RateOfThisStep(optimizer, 0.1)
    for epoch in range(3):
        one_pass(loader, model, optimizer, schedule)


launch(main, args)
"""

LENGTH_OF_THE_CALLER = """
from transformers import get_scheduler


def tune(loader, model, optimizer, schedule, steps, accum):
    done = 0
    for epoch in range(steps // len(loader)):
        for x, y in loader:
            (F.mse_loss(model(x), y) / accum).backward()
            done += 1
            if done % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            if done == steps:
                return


def main(steps: int, accum: int):
    schedule = get_scheduler("linear", optimizer=optimizer, num_training_steps=steps)
    tune(loader, model, optimizer, schedule, steps, accum)


fire.Fire(main)
"""

ONE_LOSS_OF_EACH_HEAD = """
def probe(body, heads, optimizers, loader):
    for x, y in loader:
        losses = []
        for head, optimizer in zip(heads, optimizers):
            loss = F.cross_entropy(head(body(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        log([loss.item() for loss in losses])
"""

LOOKALIKES = {
    name.lower(): text
    for name, text in list(globals().items())
    if name.isupper() and isinstance(text, str) and name != "SETUP"
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_public_loop_that_is_right_raises_nothing(name: str) -> None:
    findings = lint(Source(f"{name}.py", SETUP + LOOKALIKES[name])).findings
    assert [f for f in findings if f.level is not Level.ADVICE] == []


def test_a_counter_that_stands_still_steps_on_the_first_microbatch() -> None:
    text = """
class Trainer:
    def __init__(self, k):
        self.k, self.steps = k, 0

    def load(self, state):
        self.steps = state["steps"]

    def fit(self, model, loader, optimizer):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y) / self.k
            loss.backward()
            due = self.steps % self.k == 0
            if due:
                optimizer.step()
                optimizer.zero_grad()
            self.steps += int(due)
"""
    findings = lint(Source("trainer.py", SETUP + text)).findings
    (found,) = [finding for finding in findings if finding.defect.code == "MS107"]
    assert "on the first microbatch" in found.evidence


TEN_WHOLE_WINDOWS = """
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        if i // args.k >= len(loader) // args.k:
            break
        if i % args.k == 0:
            optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / args.k).backward()
        if (i + 1) % args.k == 0:
            optimizer.step()
"""

PUT_BACK_AFTER_WARMING_UP = """
first = {"model": copy.deepcopy(model.state_dict()), "optimizer": optimizer.state_dict()}
train(model, optimizer)
model.load_state_dict(first["model"])
optimizer.load_state_dict(first["optimizer"])
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "log.pt")
"""

NUMBERS_ON_THE_HOST = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    left = int((done - total) * seconds_each)
print(F.cross_entropy(model(x), y).item())
"""

ADVICE = {
    "MS106": TEN_WHOLE_WINDOWS,
    "MS707": PUT_BACK_AFTER_WARMING_UP,
    "MS801": NUMBERS_ON_THE_HOST,
}


@pytest.mark.parametrize("code", ADVICE)
def test_there_is_no_advice_for_what_the_loop_does_not_do(code: str) -> None:
    findings = lint(Source("train.py", SETUP + ADVICE[code])).findings
    assert code not in {finding.defect.code for finding in findings}


def test_of_two_replicated_models_the_one_that_is_reduced_is_not_guessed() -> None:
    text = """
from torch.nn.parallel import DistributedDataParallel as DDP

maker, judge = DDP(nn.Linear(4, 4)), DDP(nn.Linear(4, 1))
optimizer = choose(judge, args)
for i, (x, y) in enumerate(loader):
    loss = judge(maker(x).detach()).mean() / args.k
    loss.backward()
    if (i + 1) % args.k == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
    findings = lint(Source("train.py", SETUP + text)).findings
    assert "MS504" not in {finding.defect.code for finding in findings}


def test_gradients_that_are_divided_with_every_microbatch_are_told() -> None:
    text = """
def scale_all(parameters, factor):
    for p in parameters:
        if p.grad is not None:
            p.grad.data.mul_(factor)


for i, (x, y) in enumerate(loader):
    F.mse_loss(model(x), y, reduction="sum").backward()
    scale_all(model.parameters(), 1 / len(x))
    if (i + 1) % args.k == 0 or i == len(loader) - 1:
        optimizer.step()
        optimizer.zero_grad()
"""
    findings = lint(Source("train.py", SETUP + text)).findings
    assert [f.defect.code for f in findings if f.level is Level.ERROR] == ["MS102"]
    last = text.replace("    scale_all(", "    if (i + 1) % args.k == 0:\n        scale_all(")
    findings = lint(Source("train.py", SETUP + last)).findings
    assert "MS102" not in {finding.defect.code for finding in findings}


def test_a_loop_of_another_library_is_left_alone() -> None:
    text = """
from mxnet import autograd, gluon

optim = gluon.Trainer(model.collect_params(), "sgd")
for x, y in batches:
    with autograd.record():
        loss = model(x, y)
    loss.backward()
    optim.step(1)
"""
    assert lint(Source("train.py", text)).findings == []
    assert lint(Source("train.py", "import torch\n" + text)).findings != []


def test_a_layer_that_is_not_in_a_model_is_not_known() -> None:
    text = """
tower = nn.Sequential()
print(tower[0], tower[-1])
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
    findings = lint(Source("train.py", SETUP + text)).findings
    assert "MS109" in {finding.defect.code for finding in findings}


def test_a_loss_that_is_divided_where_it_stands_in_a_result_is_divided() -> None:
    text = """
for i, (x, y) in enumerate(loader):
    result = task.train_step(x, y)
    result.loss /= args.k
    result.loss.backward()
    if (i + 1) % args.k == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
    findings = lint(Source("train.py", SETUP + text)).findings
    assert "MS103" not in {finding.defect.code for finding in findings}
    undivided = text.replace("    result.loss /= args.k\n", "")
    findings = lint(Source("train.py", SETUP + undivided)).findings
    assert "MS103" in {finding.defect.code for finding in findings}


def test_microbatches_that_are_cleared_one_by_one_need_no_divisor() -> None:
    text = """
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if (i + 1) % args.k == 0:
        optimizer.step()
"""
    findings = lint(Source("train.py", SETUP + text)).findings
    found = {finding.defect.code for finding in findings if finding.level is not Level.ADVICE}
    assert found == {"MS110"}
