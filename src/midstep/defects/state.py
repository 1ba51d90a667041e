"""MS701 to MS707: what the optimizer holds, and what a checkpoint forgets."""

from __future__ import annotations

from .defect import Defect, Level, Tool

__all__ = ["STATE"]

STATE = (
    Defect(
        code="MS701",
        name="parameters-without-optimizer",
        title="Parameters get gradients that no optimizer uses.",
        level=Level.WARNING,
        why="A module was added and not given to the optimizer, or a list of modules hides its "
        "parameters from `model.parameters()`.",
        effect="They keep their random weights, while their backward is paid for with every "
        "batch; their gradients grow for ever, because `zero_grad` does not reach them.",
        fix="Give them to the optimizer, or freeze them with `requires_grad_(False)`.",
        bad="""\
head = nn.Linear(3, 3)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(head(model(x)), y)
    loss.backward()  # MS701
    optimizer.step()
""",
        good="""\
head = nn.Linear(3, 3)
optimizer.add_param_group({"params": head.parameters()})
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(head(model(x)), y)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.AUDIT,),
    ),
    Defect(
        code="MS702",
        name="optimizer-without-gradients",
        title="An optimizer holds parameters that never get a gradient.",
        level=Level.WARNING,
        why="The loss does not reach them: a layer that is not used, a `detach`, a graph cut by "
        "`no_grad` or `.data`.",
        effect="They are never trained. With a scaler, `step` stops with `No inf checks` when an "
        "optimizer has no gradient at all.",
        fix="Connect them to the loss, or leave them out of the optimizer.",
        bad="""\
head = nn.Linear(3, 3)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(head(model(x).detach()), y)
    loss.backward()
    optimizer.step()  # MS702
""",
        good="""\
head = nn.Linear(3, 3)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(head(model(x)), y)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.AUDIT,),
    ),
    Defect(
        code="MS703",
        name="stale-parameters",
        title="The optimizer holds the parameters of a model that was replaced.",
        level=Level.ERROR,
        why="The model, or one of its layers, was made anew after the optimizer had taken the "
        "parameters.",
        effect="The optimizer moves tensors that nobody reads; the new ones keep their initial "
        "weights.",
        fix="Build and change the model first, then make the optimizer.",
        bad="""\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model[2] = nn.Linear(8, 3)  # MS703
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        good="""\
model[2] = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS704",
        name="parameters-listed-twice",
        title="The same parameter is stepped twice in one update.",
        level=Level.ERROR,
        why="A list of parameters names a module and one of its parts, or two optimizers hold the "
        "same module.",
        effect="The parameter moves twice as far and decays twice; its moments are updated twice.",
        fix="Name every parameter once.",
        bad="""\
params = [*model.parameters(), *model[2].parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)  # MS704
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        good="""\
params = [*model.parameters()]
optimizer = torch.optim.SGD(params, lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS705",
        name="recompute-loses-random-state",
        title="Recomputed layers draw other random numbers than the forward did.",
        level=Level.ERROR,
        why="`checkpoint(..., preserve_rng_state=False)` runs the layers a second time in the "
        "backward, with dropout masks drawn anew.",
        effect="The loss belongs to one set of masks and the gradient to another. The loss looks "
        "right; the training is worse or diverges.",
        fix="Leave `preserve_rng_state` at its default, True.",
        bad="""\
from torch.utils.checkpoint import checkpoint

block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
optimizer = torch.optim.SGD([*model.parameters(), *block.parameters()], lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    hidden = model[1](model[0](x))
    hidden = checkpoint(block, hidden, use_reentrant=False, preserve_rng_state=False)  # MS705
    loss = F.cross_entropy(model[2](hidden), y)
    loss.backward()
    optimizer.step()
""",
        good="""\
from torch.utils.checkpoint import checkpoint

block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
optimizer = torch.optim.SGD([*model.parameters(), *block.parameters()], lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    hidden = model[1](model[0](x))
    hidden = checkpoint(block, hidden, use_reentrant=False)
    loss = F.cross_entropy(model[2](hidden), y)
    loss.backward()
    optimizer.step()
""",
        tools=(Tool.LINT, Tool.AUDIT, Tool.VERIFY),
    ),
    Defect(
        code="MS706",
        name="resume-forgets-state",
        title="A checkpoint holds the weights, but not all that changes with them.",
        level=Level.WARNING,
        why="They are used in training and can be saved, and the checkpoint that is loaded to go "
        "on was made without them.",
        effect="The continued run begins its schedule and its moments anew: another warm-up, "
        "another rate, another loss scale.",
        fix="Save and load the `state_dict` of everything that changes while training.",
        bad="""\
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    scheduler.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")  # MS706

state = torch.load("run.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
""",
        good="""\
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    scheduler.step()
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
torch.save({name: part.state_dict() for name, part in parts.items()}, "run.pt")

state = torch.load("run.pt")
for name, part in parts.items():
    part.load_state_dict(state[name])
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
    Defect(
        code="MS707",
        name="resume-forgets-random-state",
        title="A checkpoint forgets the random state and the place in the data.",
        level=Level.ADVICE,
        why="Weights, optimizer and schedule are saved and loaded; the random streams and the "
        "number of batches read in this pass are not.",
        effect="The continued run draws other masks and, stopped within a pass, reads its first "
        "batches twice and its last ones never. It is not the uninterrupted run.",
        fix="Save `torch.get_rng_state()` (and those of python, numpy and the devices) and the "
        "place in the loader, or use `midstep.save` and `midstep.load`.",
        bad="""\
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")  # MS707

state = torch.load("run.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
""",
        good="""\
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save({**parts, "random": torch.get_rng_state(), "batches": len(loader)}, "run.pt")

state = torch.load("run.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
torch.set_rng_state(state["random"])
""",
        tools=(Tool.LINT, Tool.AUDIT),
    ),
)
