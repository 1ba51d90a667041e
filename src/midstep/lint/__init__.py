"""The linter: find defects of training loops in their text, without running it.

`source` reads a file, `reading` walks through it as Python would and writes down what its loops do,
`loops` finds the updates, `rules` judge them. Nothing here imports torch.
"""

from .linting import Linted, lint
from .source import Source, UnreadableFile, python_files, read

__all__ = ["Linted", "Source", "UnreadableFile", "lint", "python_files", "read"]
