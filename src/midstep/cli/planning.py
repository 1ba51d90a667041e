"""What `midstep plan` does with its options: the arithmetic, the traced ways, the trade-off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from ..arithmetic import (
    Dtype,
    OptimizerKind,
    Scaling,
    Sharded,
    State,
    lora_parameters,
    memory_of,
    parse_bytes,
    parse_count,
    scaled_rate,
    show_bytes,
)
from ..pictures import check_picture_path
from .failures import FINE, FOUND
from .plan_declarations import Format

if TYPE_CHECKING:
    from ..planning import Tradeoff
    from ..recipes.recipe import Recipe

__all__ = ["Change", "Device", "Kept", "Trained", "Update", "run_plan"]


class Trained(NamedTuple):
    """What is trained, as it was typed."""

    params: str | None
    trainable: str | None
    lora: int | None
    adapt: str | None


class Kept(NamedTuple):
    """What is kept beside the weights, and how wide."""

    optimizer: OptimizerKind
    dtype: Dtype
    frozen_dtype: Dtype | None
    grad_dtype: Dtype | None
    state_dtype: Dtype | None
    master: bool


class Update(NamedTuple):
    """Which update is planned, and what is done with the plan."""

    recipe: str | None
    rows: int | None
    targets: int | None
    check: bool
    time: bool
    recompute: bool
    picture: Path | None
    all_ways: bool


class Device(NamedTuple):
    """What there is to fit into."""

    budget: str | None
    headroom: float
    ranks: int
    sharded: Sharded
    defer: bool

    @property
    def limit(self) -> int | None:
        """The budget in bytes."""
        return None if self.budget is None else parse_bytes(self.budget)


class Change(NamedTuple):
    """What an update was over, and what it will be."""

    new_batch: float | None
    batch: float | None
    lr: float | None
    decay: float | None
    updates: int | None


def run_plan(
    trained: Trained,
    kept: Kept,
    update: Update,
    device: Device,
    change: Change,
    *,
    form: Format,
) -> int:
    """Plan what was asked for.

    Args:
        trained: Parameters, for the arithmetic.
        kept: Optimizer and dtypes, for the arithmetic.
        update: Recipe and target, for the trace.
        device: Budget and ranks.
        change: Another batch, for advice on rate and decay.
        form: How it is printed.

    Returns:
        The exit code: fine, or found that it does not fit.

    Raises:
        ValueError: The options do not go together, or one cannot be read.
    """
    if any(value is not None for value in change):
        if update.recipe is not None or trained.params is not None:
            raise ValueError("`--new-batch` with a recipe or `--params`: ask for one at a time")
        return _print_advice(change, form)
    if (update.recipe is None) == (trained.params is None):
        raise ValueError(
            "what is planned? Give a recipe (`midstep plan language`), or a number of parameters "
            "(`midstep plan --params 400M`)"
        )
    if trained.params is not None:
        _refuse_with_params(update)
        return _print_state(_state(trained, kept, device), device, form)
    assert update.recipe is not None
    _refuse_with_recipe(trained, kept, device)
    if update.picture is not None and not update.recompute:
        raise ValueError("`--picture` is drawn of `--recompute`: give both")
    if update.picture is not None:
        check_picture_path(update.picture)
    recipe = _recipe(update.recipe)
    if update.recompute:
        return _print_tradeoff(recipe, update.picture, form)
    return _print_ways(recipe, update, device, form)


def _print_advice(change: Change, form: Format) -> int:
    new_batch, batch, lr, decay, updates = change
    if new_batch is None or batch is None or lr is None or decay is None or updates is None:
        raise ValueError(
            "`--new-batch`, `--batch`, `--lr`, `--decay` and `--updates` belong together: give all"
        )
    advice = [
        scaled_rate(
            scaling, lr=lr, decay=decay, batch=batch, new_batch=new_batch, num_updates=updates
        )
        for scaling in Scaling
    ]
    if form is Format.JSON:
        rows = [
            {
                "scaling": a.scaling.name.lower(),
                "lr": a.lr,
                "decay": a.decay,
                "updates": updates * batch / new_batch,
                "decay_exponent": a.exponent,
                "decay_exponent_unchanged": a.exponent_unchanged,
                "condition": a.scaling.condition,
            }
            for a in advice
        ]
        typer.echo(json.dumps(rows, indent=2))
        return FINE
    typer.echo(
        f"{batch:,.10g} to {new_batch:,.10g} targets an update: "
        f"{updates * batch / new_batch:,.10g} updates for the same targets"
    )
    for line in advice:
        typer.echo(str(line))
    typer.echo(
        "A parameter whose gradient is missing (None) is skipped, decay included; one whose "
        "gradient is zero is decayed. Both are where to begin a sweep, not where to end it."
    )
    return FINE


def _refuse_with_params(update: Update) -> None:
    typed = [
        f"`--{name}`"
        for name in ("rows", "targets", "check", "time", "recompute", "picture")
        if getattr(update, name)
    ]
    if typed:
        raise ValueError(
            f"{', '.join(typed)} with `--params`: that needs a model to trace. Name a recipe "
            "instead"
        )


def _refuse_with_recipe(trained: Trained, kept: Kept, device: Device) -> None:
    typed = {**trained._asdict(), **kept._asdict(), "defer": device.defer}
    usual = {"optimizer": OptimizerKind.ADAMW, "dtype": Dtype.FP32, "master": False, "defer": False}
    wrong = [name for name, value in typed.items() if value != usual.get(name)]
    if wrong:
        names = ", ".join(f"`--{name.replace('_', '-')}`" for name in wrong)
        raise ValueError(f"{names} with a recipe, whose own model and optimizer are traced")


def _state(trained: Trained, kept: Kept, device: Device) -> State:
    assert trained.params is not None
    total = parse_count(trained.params)
    adapters = _adapters(trained.lora, trained.adapt)
    number = total if trained.trainable is None else parse_count(trained.trainable)
    if adapters is not None:
        if trained.trainable is not None:
            raise ValueError("`--trainable` with `--lora`: the adapters are what is trained")
        number, total = adapters, total + adapters
    if number > total:
        raise ValueError(f"`--trainable {trained.trainable}` is more than `--params`")
    return State(
        trainable=number,
        frozen=total - number,
        optimizer=kept.optimizer,
        dtype=kept.dtype,
        frozen_dtype=kept.frozen_dtype,
        grad_dtype=kept.grad_dtype,
        state_dtype=kept.state_dtype,
        master=kept.master,
        num_ranks=device.ranks,
        sharded=device.sharded,
        defers_sync=device.defer,
    )


def _adapters(rank: int | None, matrices: str | None) -> int | None:
    if rank is None and matrices is None:
        return None
    if rank is None or matrices is None:
        raise ValueError("`--lora RANK` and `--adapt NxROWSxCOLUMNS` belong together: give both")
    kinds = []
    for kind in matrices.split(","):
        parts = kind.strip().split("x")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ValueError(f"`--adapt {kind}`: write number, rows, columns, as `128x4096x4096`")
        kinds.append((int(parts[0]), int(parts[1]), int(parts[2])))
    return lora_parameters(rank, kinds)


def _print_state(state: State, device: Device, form: Format) -> int:
    memory = memory_of(state, budget=device.limit, headroom=device.headroom)
    if form is Format.JSON:
        rows = [{"name": r.name, "bytes": r.num_bytes, "note": r.note} for r in memory.rows()]
        typer.echo(json.dumps({"lines": rows, "assumes": memory.assumes}, indent=2))
    else:
        typer.echo(str(memory))
    return FINE if memory.left_bytes is None or memory.left_bytes >= 0 else FOUND


def _recipe(name: str) -> Recipe:
    from ..recipes.loading import find_recipe, load_recipe
    from .options import DEFAULT_SEED

    return load_recipe(find_recipe(name), seed=DEFAULT_SEED)


def _print_ways(recipe: Recipe, update: Update, device: Device, form: Format) -> int:
    if update.check and device.ranks > 1:
        raise ValueError(
            f"`--check --ranks {device.ranks}`: one process alone holds something else than a rank "
            "does. Check a plan of one rank"
        )
    from ..planning import plan
    from ..planning.recipes import first_batch, make_optimizer, rows_of_update

    batch, make = first_batch(recipe), make_optimizer(recipe)
    rows = update.rows
    if rows is None and update.targets is None:
        rows = rows_of_update(recipe, batch) * device.ranks
    found = plan(
        recipe.model,
        batch,
        recipe.loss,
        optimizer=make,
        rows=rows,
        targets=update.targets,
        count=recipe.count,
        budget=device.limit,
        headroom=device.headroom,
        num_ranks=device.ranks,
        sharded=device.sharded,
        timed=update.time,
    )
    checked = None
    if update.check and found.best is not None:
        checked = found.check(recipe.model, batch, recipe.loss, optimizer=make)
    if form is Format.JSON:
        values: dict[str, Any] = found.to_json()
        if checked is not None:
            values["checked"] = checked.to_json()
        typer.echo(json.dumps(values, indent=2))
    else:
        typer.echo(f"ways to an update of {found.rows:,} rows")
        typer.echo(found.table(None if update.all_ways else 8))
        if checked is not None:
            typer.echo(f"The first, run: {checked}.")
    return FINE if found.best is not None else FOUND


def _print_tradeoff(recipe: Recipe, picture: Path | None, form: Format) -> int:
    from ..planning import measure_tradeoff
    from ..planning.recipes import first_batch, loss_on

    rows = measure_tradeoff(recipe.model, loss_on(recipe, first_batch(recipe)))
    if form is Format.JSON:
        fields = ("every", "peak_bytes", "relative_time", "gradient_gap", "model_parts")
        typer.echo(json.dumps([{f: getattr(row, f) for f in fields} for row in rows], indent=2))
    else:
        typer.echo(_tradeoff_table(rows))
    if picture is not None:
        from ..pictures import save_picture
        from ..planning.picture import picture as draw

        title = "Blocks run again together: memory and time"
        save_picture(draw(rows, title=title), picture, title=title)
    return FINE if all(row.gradient_gap == 0 for row in rows) else FOUND


def _tradeoff_table(rows: list[Tradeoff]) -> str:
    lines = [f"{'run again':>12} {'peak':>24} {'share':>6} {'time':>6} {'gap':>8} {'L/k + k':>8}"]
    for row in rows:
        name = f"every {row.every}" if row.every else "none"
        share = row.peak_bytes / rows[0].peak_bytes
        lines.append(
            f"{name:>12} {show_bytes(row.peak_bytes):>24} {share:>5.0%} {row.relative_time:>5.2f}x "
            f"{row.gradient_gap:>8.1e} {row.model_parts:>8.2f}"
        )
    lines.append(
        "Peak: of forward and backward, beyond weights and batch. Gap: of gradients, from those "
        "without. L/k + k: the textbook's parts of a block, of equal blocks."
    )
    return "\n".join(lines)
