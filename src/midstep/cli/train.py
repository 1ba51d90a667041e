"""`midstep train`: a recipe in, a trained run out, and nothing lost on the way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NonFiniteGradient
from . import declarations as given
from .failures import FINE, INTERRUPTED, attempt, fail
from .launch import Launch, Speaker
from .options import DEFAULT_SEED, Options
from .waiting import sleep_while_waiting

if TYPE_CHECKING:
    from ..recipes.folder import RunFolder
    from ..recipes.spread import Spread
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
    observe: given.Observe = None,
    parallel: given.Parallel = None,
    traceback: given.Traceback = False,
) -> int:
    """Train a recipe, with progress, records, checkpoints and a summary.

    Ctrl-C or SIGTERM saves the run and says how to go on; a second one stops at once. On many
    ranks: torchrun --nproc-per-node N -m midstep train RECIPE --parallel ddp.
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
            observe=observe,
            parallel=parallel,
        )
        sleep_while_waiting()
        if resume is not None:
            return _resume(resume, recipe, out, options, speaker)
        return _begin(recipe, out, options, speaker)

    with Speaker(Launch.of(os.environ)) as speaker:
        return attempt(action, traceback=traceback, say=speaker)


def _begin(name: str | None, out: Path | None, options: Options, speaker: Speaker) -> int:
    from ..recipes.loading import BUILT_IN, find_recipe, load_recipe

    if name is None:
        raise ValueError(
            f"which recipe? Name a built-in one ({', '.join(BUILT_IN)}) or a `.py` file, as in "
            f"`midstep train {BUILT_IN[0]}`"
        )
    source = find_recipe(name)  # before torch is imported
    launch = speaker.launch
    parallel = launch.parallel(options.parallel)

    from ..recipes.folder import RunFolder, new_path
    from ..recipes.settings import make_updater
    from ..recipes.share import require_turns
    from ..recipes.training import Training
    from .identity import about

    launch.use_own_device()
    recipe = load_recipe(source, seed=DEFAULT_SEED if options.seed is None else options.seed)
    settings = options.settings(recipe)
    require_turns(settings.size, launch.num_ranks)
    with speaker.spread(parallel, recipe.device) as spread:
        updater = make_updater(recipe, settings, spread)

        def made() -> RunFolder:
            path = out if out is not None else new_path(Path("runs"), Path(source).stem)
            words = about(source, options, settings, recipe, launch.num_ranks)
            return RunFolder.create(path, words)

        with _of_first_rank(spread, made) as folder:
            training = Training(recipe, settings, updater, folder, spread)
            with _saying_what_is_saved(training, launch):
                training.begin()
                return _run(training, speaker)


def _resume(
    path: Path, name: str | None, out: Path | None, options: Options, speaker: Speaker
) -> int:
    from ..recipes.folder import RunFolder, read_about
    from ..recipes.loading import find_recipe, load_recipe
    from ..recipes.settings import make_updater
    from ..recipes.share import require_turns
    from ..recipes.training import Training
    from .identity import changes, refuse_another_run

    if out is not None and out.absolute() != path.absolute():
        raise ValueError(
            f"`--out {out}` with `--resume {path}`: a run goes on in its own folder. Leave `--out` "
            "out"
        )
    launch, about = speaker.launch, read_about(path)
    source = find_recipe(about["recipe"])
    if name is not None and find_recipe(name) != source:
        raise ValueError(f"`{path}` is a run of the recipe `{source}`, not of `{name}`")
    typed, options = options.parallel, options.over(about["options"])
    parallel = launch.parallel(typed, options.parallel)
    launch.use_own_device()
    recipe = load_recipe(source, seed=DEFAULT_SEED if options.seed is None else options.seed)
    settings = options.settings(recipe)
    refuse_another_run(path, about, settings)
    require_turns(settings.size, launch.num_ranks)
    with (
        speaker.spread(parallel, recipe.device) as spread,
        _of_first_rank(spread, lambda: RunFolder.open(path)) as folder,
    ):
        for change in changes(about, source, launch.num_ranks) if spread.rank == 0 else ():
            fail(f"note: {change}.")
        updater = make_updater(recipe, settings, spread)
        training = Training(recipe, settings, updater, folder, spread)
        training.resume()
        with _saying_what_is_saved(training, launch):
            return _run(training, speaker)


def _of_first_rank(spread: Spread, make: Callable[[], RunFolder]) -> RunFolder:
    """Have the first rank hold the folder; the others are told where it is."""
    from ..recipes.folder import Followed

    held: list[RunFolder] = []

    def made() -> tuple[Path, Mapping[str, Any]]:
        held.append(make())
        return held[0].path, held[0].about

    path, about = spread.first(made)
    return held[0] if held else Followed(path, about)


def _run(training: Training, speaker: Speaker) -> int:
    """Show the training until it is complete or stopped, then say how it went."""
    from .watching import watch_of

    stop, spread = speaker.stop, training.spread
    path, steps, step = training.folder.path, training.settings.steps, training.saved_step
    watch = watch_of(path.name, steps, step, stop, speaks=spread.rank == 0)
    if not training.is_complete:
        watch.say(f"{path}: {_length(training)}" + (f", going on after {step:,}" if step else ""))
    with stop.listening():
        with watch.showing():
            training.run(watch, should_stop=stop)
        if training.is_complete:
            lines = list(training.summary().lines())
            if spread.rank == 0:
                lines += _verdict_lines(path, speaker.launch)
            for line in [*lines, f"{'written to':20}{path}"]:
                watch.say(line)
            return FINE
        number = spread.any_of(stop.signal)
        assert number is not None
        if spread.rank == 0:
            fail(
                f"stopped after {training.saved_step:,} of {steps:,} updates, and saved. Go on "
                f"with: {_resume_command(path, speaker.launch)}",
            )
        return INTERRUPTED + number


def _length(training: Training) -> str:
    spread = training.spread
    ranks = "" if spread.world is None else f" on {spread.num_ranks} ranks"
    return f"{training.settings.steps:,} updates{ranks}"


def _verdict_lines(path: Path, launch: Launch) -> Iterator[str]:
    """Say what the record of the run shows, and which command shows all of it."""
    from ..report import judge, read

    judgement = judge(read(path))
    number = len(judgement.findings)
    words = f"{number} finding{'' if number == 1 else 's'}" if number else "nothing found"
    yield f"{'verdict':20}{words}"
    for finding in judgement.findings:
        yield from finding.lines()
    yield f"{'to see it':20}{launch.command('report', str(path))}"


@contextlib.contextmanager
def _saying_what_is_saved(training: Training, launch: Launch) -> Iterator[None]:
    """Have an error say how the run can go on; of a run that made no update, leave nothing."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, NonFiniteGradient):
            error.add_note("Here that is `--skip-nonfinite 5`.")
        if not training.folder.discard_if_empty():
            error.add_note(
                f"The run is saved as it was after {training.saved_step:,} updates; "
                f"`{_resume_command(training.folder.path, launch)}` goes on from there."
            )
        raise


def _resume_command(path: Path, launch: Launch) -> str:
    return launch.command("train", "--resume", str(path))
