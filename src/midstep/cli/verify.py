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

__all__ = ["verify"]

_ROWS = 8


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
        from ..recipes.loading import find_recipe, load_recipe

        source = find_recipe(recipe)  # before torch is imported

        from ..verifying import verify as certified

        if rows < 3:
            raise ValueError(
                f"`--rows {rows}`: at least 3, because fewer cannot be cut unevenly, and then a "
                "mean of means would pass"
            )
        made = load_recipe(source, seed=seed)
        made.model.train(not evaluation)
        certificate = certified(
            made.model,
            _batch(made, rows),
            made.loss,
            count=made.count,
            optimizer=made.optimizer(made.model, made.lr),
            clip=made.clip,
        )
        sys.stdout.write(certificate.to_json() if output is Format.JSON else str(certificate))
        sys.stdout.write("\n")
        return certificate.exit_code

    return attempt(action, traceback=traceback)


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
