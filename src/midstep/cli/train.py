"""The command `midstep train`: a recipe trained, with progress, records, checkpoints, a summary."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .failures import report
from .options import Options, PrecisionName, ScheduleName

if TYPE_CHECKING:
    from ..recipes.folder import RunFolder
    from ..recipes.training import Training

__all__ = ["train"]

_COULD_NOT = 2
_RUNS = Path("runs")


def train(  # noqa: PLR0917 - typer reads the options from the signature
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (language) or a .py file.")],
    size: Annotated[int | None, typer.Option(help="Batches an update.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Cut each batch into microbatches of at most so many rows.")
    ] = None,
    targets: Annotated[
        int | None, typer.Option(help="As many batches an update as hold so many targets.")
    ] = None,
    precision: Annotated[
        PrecisionName | None, typer.Option(help="What the forward runs in.")
    ] = None,
    clip: Annotated[
        str | None, typer.Option(help="Largest gradient norm, or `none` to only measure.")
    ] = None,
    schedule: Annotated[
        ScheduleName | None, typer.Option(help="How the rate moves after its warm-up.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Updates of warm-up; needs --schedule.")
    ] = None,
    minimum: Annotated[
        float | None, typer.Option(help="Last rate over the base rate; needs --schedule.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Base rate.")] = None,
    steps: Annotated[int | None, typer.Option(help="Applied updates of the whole run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random stream; 0 by default.")] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Updates between checkpoints; a tenth of the run by default.")
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(help="Updates between held-out losses; a quarter of the run by default."),
    ] = None,
    skip_nonfinite: Annotated[
        int | None,
        typer.Option(
            help="Skip so many non-finite updates in a row; by default the first ends it."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/NAME-1, -2, ... by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, as it was begun.")
    ] = None,
    traceback: Annotated[bool, typer.Option(help="Show where an error came from.")] = False,
) -> None:
    """Train a recipe: exact gradients, progress, records, checkpoints, a summary.

    Options that are left out take the recipe's values. Writes run.json, updates.jsonl,
    held_out.jsonl and checkpoint.pt. Ctrl-C saves and says how to go on.
    """
    try:
        options = Options(
            recipe=recipe,
            seed=seed,
            size=size,
            rows=rows,
            targets=targets,
            precision=precision,
            clip=clip,
            schedule=schedule,
            warmup=warmup,
            minimum=minimum,
            lr=lr,
            steps=steps,
            save_every=save_every,
            evaluate_every=evaluate_every,
            skip_nonfinite=skip_nonfinite,
        )
        code = _train(options, out=out, resume=resume, shows_all=traceback)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # noqa: BLE001 - one line for whatever goes wrong
        report(error, shows_all=traceback)
        code = _COULD_NOT
    raise typer.Exit(code)


def _train(options: Options, *, out: Path | None, resume: Path | None, shows_all: bool) -> int:
    from ..recipes.loading import find_recipe

    find_recipe(options.recipe)
    _shorten_warnings()
    with contextlib.ExitStack() as stack:
        folder = None
        if resume is not None:
            folder = stack.enter_context(_reopened(out=out, resume=resume))
            options = options.joined_with(folder.about["options"])
        training, folder = _made(options, folder, out)
        stack.enter_context(folder)
        return _run(training, options, is_resumed=resume is not None, shows_all=shows_all)


def _reopened(*, out: Path | None, resume: Path) -> RunFolder:
    from ..recipes.folder import RunFolder
    from .options import OptionError

    if out is not None:
        raise OptionError(
            f"--out {out} and --resume {resume}: a run that goes on stays in its folder. Leave "
            "--out out."
        )
    return RunFolder.open(resume)


def _made(
    options: Options, folder: RunFolder | None, out: Path | None
) -> tuple[Training, RunFolder]:
    from ..recipes.folder import RunFolder, new_path, versions
    from ..recipes.loading import find_recipe, load_recipe
    from ..recipes.settings import make_updater
    from ..recipes.training import Training

    source = find_recipe(options.recipe)
    recipe = load_recipe(source, seed=options.seed or 0)
    settings = options.settings(recipe)
    updater = make_updater(recipe, settings)
    if folder is None:
        about: dict[str, Any] = {
            "options": options.words(),
            "settings": settings.words(),
            "versions": versions(),
        }
        folder = RunFolder.create(out or new_path(_RUNS, Path(options.recipe).stem), about)
    return Training(recipe, settings, updater, folder), folder


def _run(training: Training, options: Options, *, is_resumed: bool, shows_all: bool) -> int:
    from .console import watching
    from .stopping import listening

    folder, settings = training.folder, training.settings
    go_on = f"midstep train {shlex.quote(options.recipe)} --resume {shlex.quote(str(folder.path))}"
    try:
        if is_resumed:
            training.resume()
        else:
            training.begin()
        done = training.updater.clock.step
        with listening() as request, watching(steps=settings.steps, done=done) as watcher:
            training.run(watcher, should_stop=request)
    except Exception as error:  # noqa: BLE001 - one line for whatever goes wrong
        report(error, shows_all=shows_all, hint=_what_is_saved(training, go_on))
        folder.discard_if_empty()
        return _COULD_NOT
    for line in training.summary().lines():
        typer.echo(line)
    typer.echo(f"{'written to':20}{folder.path}")
    if training.is_complete:
        return 0
    typer.echo(
        f"Stopped after update {training.updater.clock.step} and saved. Go on with:\n{go_on}"
    )
    return 0 if request.signal is None else 128 + request.signal


def _what_is_saved(training: Training, go_on: str) -> str:
    if not training.saved_step:
        return ""
    return f"saved after update {training.saved_step}; go on with: {go_on}"


def _shorten_warnings() -> None:
    import warnings

    def shortened(message: Warning | str, *_args: object, **_kwargs: object) -> str:
        return f"midstep: warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = shortened
