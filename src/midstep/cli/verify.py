"""`midstep verify`: does a recipe's accumulated gradient equal that of the batch at once?"""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .declarations import Traceback
from .failures import attempt
from .options import DEFAULT_SEED

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe
    from ..verifying import Certificate

__all__ = ["verify"]

_ROWS = 8
_FEWEST_ROWS = 3


class Format(enum.StrEnum):
    """How a certificate is written."""

    TEXT = "text"
    JSON = "json"


def verify(  # noqa: PLR0917 - an option of the command is an argument here
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A built-in recipe (language, digits or pairs), or a .py file that defines "
            "recipe(seed) and returns a midstep.Recipe.",
            show_default=False,
        ),
    ],
    rows: Annotated[
        int, typer.Option(metavar="N", help="Rows of the batch that is cut; at least 3.")
    ] = _ROWS,
    evaluation: Annotated[
        bool,
        typer.Option(
            "--evaluation",
            help="Check the model in evaluation mode: without dropout, with frozen BatchNorm.",
        ),
    ] = False,
    output: Annotated[
        Format, typer.Option("--format", help="A page to read, or everything as JSON.")
    ] = Format.TEXT,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Decides the weights and the rows.")
    ] = DEFAULT_SEED,
    traceback: Traceback = False,
) -> int:
    """Certify that small batches add up to the large one, or name what breaks it.

    Cuts one batch in several ways, compares gradients and the next update
    within a derived rounding bound, and finds the reason for a difference by
    experiment. Exit codes: 0 equal, 1 not equal, 2 no certificate.
    """

    def action() -> int:
        certificate = _certificate(recipe, rows, seed, evaluation=evaluation)
        sys.stdout.write(certificate.to_json() if output is Format.JSON else str(certificate))
        sys.stdout.write("\n")
        return certificate.exit_code

    return attempt(action, traceback=traceback)


def _certificate(name: str, rows: int, seed: int, *, evaluation: bool) -> Certificate:
    from ..recipes.loading import find_recipe, load_recipe

    source = find_recipe(name)  # before torch is imported
    if rows < _FEWEST_ROWS:
        raise ValueError(
            f"`--rows {rows}`: at least {_FEWEST_ROWS}, because fewer cannot be cut unevenly, and "
            "then a mean of means would pass"
        )

    from ..verifying import verify as certified

    recipe = load_recipe(source, seed=seed)
    recipe.model.train(not evaluation)
    return certified(
        recipe.model,
        _batch(recipe, rows),
        recipe.loss,
        count=recipe.count,
        optimizer=recipe.optimizer(recipe.model, recipe.lr),
        clip=recipe.clip,
    )


def _batch(recipe: Recipe, rows: int) -> Any:
    """Take so many rows of the recipe's training batches, or as many as there are."""
    from ..batches import join_rows, num_rows, take_rows
    from ..errors import RecipeError

    taken: list[Any] = []
    found = 0
    for batch in recipe.train:
        taken.append(batch)
        found += num_rows(batch)
        if found >= rows:
            break
    if not taken:
        raise RecipeError("`Recipe.train` gave no batches, so there is nothing to verify.")
    joined = join_rows(taken)
    return take_rows(joined, range(min(rows, found)))
