"""`midstep train`: a recipe in, a trained run out, and nothing lost on the way."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NonFiniteGradient
from . import declarations as given
from .failures import FINE, INTERRUPTED, attempt, fail
from .options import DEFAULT_SEED, Options
from .stopping import Stop
from .waiting import sleep_while_waiting

if TYPE_CHECKING:
    from ..recipes.training import Training

__all__ = ["train"]


def train(  # noqa: PLR0917 - an option of the command is an argument here
    recipe: given.RecipeName = None,
    size: given.Size = None,
    rows: given.Rows = None,
    targets: given.Targets = None,
    precision: given.Precision = None,
    clip: given.Clip = None,
    skip_nonfinite: given.SkipNonfinite = None,
    lr: given.LearningRate = None,
    schedule: given.ScheduleShape = None,
    warmup: given.Warmup = None,
    minimum: given.Minimum = None,
    steps: given.Steps = None,
    seed: given.Seed = None,
    out: given.Out = None,
    resume: given.Resume = None,
    save_every: given.SaveEvery = None,
    evaluate_every: given.EvaluateEvery = None,
    traceback: given.Traceback = False,
) -> int:
    """Train a recipe, with progress, records, checkpoints and a summary.

    Ctrl-C or SIGTERM saves the run and says how to go on; a second one stops at once.
    """

    def action() -> int:
        options = Options(
            size=size,
            rows=rows,
            targets=targets,
            precision=precision,
            clip=clip,
            skip_nonfinite=skip_nonfinite,
            lr=lr,
            schedule=schedule,
            warmup=warmup,
            minimum=minimum,
            steps=steps,
            seed=seed,
            save_every=save_every,
            evaluate_every=evaluate_every,
        )
        sleep_while_waiting()
        if resume is not None:
            return _resume(resume, recipe, out, options)
        return _begin(recipe, out, options)

    return attempt(action, traceback=traceback)


def _begin(name: str | None, out: Path | None, options: Options) -> int:
    from ..recipes.loading import BUILT_IN, find_recipe, load_recipe

    if name is None:
        raise ValueError(
            f"which recipe? Name a built-in one ({', '.join(BUILT_IN)}) or a `.py` file, as in "
            f"`midstep train {BUILT_IN[0]}`"
        )
    source = find_recipe(name)  # before torch is imported

    from ..recipes.folder import RunFolder, new_path
    from ..recipes.settings import make_updater
    from ..recipes.training import Training
    from .identity import about

    recipe = load_recipe(source, seed=DEFAULT_SEED if options.seed is None else options.seed)
    settings = options.settings(recipe)
    updater = make_updater(recipe, settings)
    path = out if out is not None else new_path(Path("runs"), Path(source).stem)
    with RunFolder.create(path, about(source, options, settings, recipe)) as folder:
        training = Training(recipe, settings, updater, folder)
        with _saying_what_is_saved(training):
            training.begin()
            return _run(training)


def _resume(path: Path, name: str | None, out: Path | None, options: Options) -> int:
    from ..recipes.folder import RunFolder
    from ..recipes.loading import find_recipe, load_recipe
    from ..recipes.settings import make_updater
    from ..recipes.training import Training
    from .identity import changes, refuse_another_run

    if out is not None and out.absolute() != path.absolute():
        raise ValueError(
            f"`--out {out}` with `--resume {path}`: a run goes on in its own folder. Leave `--out` "
            "out"
        )
    with RunFolder.open(path) as folder:
        source = find_recipe(folder.about["recipe"])
        if name is not None and find_recipe(name) != source:
            raise ValueError(f"`{path}` is a run of the recipe `{source}`, not of `{name}`")
        options = options.over(folder.about["options"])
        recipe = load_recipe(source, seed=DEFAULT_SEED if options.seed is None else options.seed)
        settings = options.settings(recipe)
        refuse_another_run(folder, settings)
        for change in changes(folder, source):
            fail(f"note: {change}.")
        training = Training(recipe, settings, make_updater(recipe, settings), folder)
        training.resume()
        with _saying_what_is_saved(training):
            return _run(training)


def _run(training: Training) -> int:
    """Show the training until it is complete or stopped, then say how it went."""
    from .watching import watch_of

    stop = Stop()
    path, steps, step = training.folder.path, training.settings.steps, training.saved_step
    watch = watch_of(path.name, steps, step, stop)
    if not training.is_complete:
        watch.say(f"{path}: {steps:,} updates" + (f", going on after {step:,}" if step else ""))
    with stop.listening(), watch.showing():
        training.run(watch, should_stop=stop)
    if training.is_complete:
        lines = [*training.summary().lines(), *_verdict_lines(path)]
        for line in [*lines, f"{'written to':20}{path}"]:
            watch.say(line)
        return FINE
    assert stop.signal is not None
    fail(
        f"stopped after {training.saved_step:,} of {steps:,} updates, and saved. Go on with: "
        f"{_resume_command(path)}",
    )
    return INTERRUPTED + stop.signal


def _verdict_lines(path: Path) -> Iterator[str]:
    """Say what the record of the run shows, and which command shows all of it."""
    from ..report import judge, read

    judgement = judge(read(path))
    number = len(judgement.findings)
    words = f"{number} finding{'' if number == 1 else 's'}" if number else "nothing found"
    yield f"{'verdict':20}{words}"
    for finding in judgement.findings:
        yield from finding.lines()
    yield f"{'to see it':20}{_command('report', str(path))}"


@contextlib.contextmanager
def _saying_what_is_saved(training: Training) -> Iterator[None]:
    """Have an error say how the run can go on; of a run that made no update, leave nothing."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, NonFiniteGradient):
            error.add_note("Here that is `--skip-nonfinite 5`.")
        if not training.folder.discard_if_empty():
            error.add_note(
                f"The run is saved as it was after {training.saved_step:,} updates; "
                f"`{_resume_command(training.folder.path)}` goes on from there."
            )
        raise


def _resume_command(path: Path) -> str:
    return _command("train", "--resume", str(path))


def _command(*arguments: str) -> str:
    """Spell a command so that it can be pasted, whichever way this one was called."""
    called = Path(sys.argv[0])
    midstep = ["python", "-m", "midstep"] if called.name == "__main__.py" else [called.name]
    return shlex.join([*midstep, *arguments])
