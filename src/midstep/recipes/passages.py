"""The data of the `pairs` recipe: headings of the Python reference, and passages from under them.

It decides what a title is, what a passage is, which passages are held out, and how words become
numbers. The text is that of `corpus`, without its copies. The model and the loss are the caller's.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .corpus import reference_topics, without_copies

__all__ = ["Batch", "DistinctTitles", "Pairs", "Split", "loader", "pairs_of", "sections"]

T = TypeVar("T")

VOCAB_SIZE = 8192  # rows of an embedding; 0 is for padding, words share the others by their hash
PASSAGE_WORDS = 32
TITLE_IDS = 24
PASSAGE_IDS = 2 * PASSAGE_WORDS

# As the reference marks them: a line, and under it a line of one of these signs.
_HEADING = re.compile(r"^(\S.*)\n([*=\-~^])\2{2,}$", re.MULTILINE)
_HELD_OUT_SHARE = 5  # one passage in five, of each section that has so many
_MOST_PASSAGES = 40  # of a section; else the longest of them would make every batch small
_SHORTEST = PASSAGE_WORDS // 2  # words; a shorter rest is no passage


class Batch(TypedDict):
    """One title with a passage from under it, or many stacked. No title comes twice in a batch."""

    title_ids: Tensor  # [..., TITLE_IDS] int64, words and pairs of words; 0 where there is none
    passage_ids: Tensor  # [..., PASSAGE_IDS] int64, the same of the passage


class Pairs(Dataset[Batch]):
    """Titles with passages, each title as often as it has passages.

    Args:
        titles: The title of each passage.
        passages: Their words.
    """

    def __init__(self, titles: Sequence[str], passages: Sequence[Sequence[str]]) -> None:
        self.titles = tuple(titles)
        self.title_ids = torch.stack([_ids(_words(title), TITLE_IDS) for title in titles])
        self.passage_ids = torch.stack([_ids(words, PASSAGE_IDS) for words in passages])

    def __len__(self) -> int:
        return len(self.titles)

    def __getitem__(self, index: int) -> Batch:
        return Batch(title_ids=self.title_ids[index], passage_ids=self.passage_ids[index])


class Split(NamedTuple):
    """Pairs to train on and pairs to judge by: the same titles, other passages."""

    train: Pairs
    held_out: Pairs


def sections() -> dict[str, str]:
    """Return the text under each heading of the Python reference, up to the next heading.

    Example:
        >>> sections()["Lambdas"].split()[:3]
        ['lambda_expr', '::=', '"lambda"']
    """
    found: dict[str, str] = {}
    for text in without_copies(reference_topics()).values():
        headings = list(_HEADING.finditer(text))
        ends = [heading.start() for heading in headings[1:]] + [len(text)]
        for heading, end in zip(headings, ends, strict=True):
            found[heading[1]] = found.get(heading[1], "") + text[heading.end() : end]
    return found


def pairs_of(texts: Mapping[str, str]) -> Split:
    """Cut texts into passages of 32 words, and hold out every fifth of each text.

    Which fifth is decided by a digest of the title: arbitrary, but the same in every process. No
    more than 40 passages are taken of a text.

    Args:
        texts: By title.

    Example:
        >>> split = pairs_of({"One": "red green blue " * 80, "Two": "one two three " * 20})
        >>> len(split.train), len(split.held_out)
        (9, 1)
    """
    train: list[tuple[str, list[str]]] = []
    held_out: list[tuple[str, list[str]]] = []
    for title, text in texts.items():
        passages = list(_passages(_words(text)))[:_MOST_PASSAGES]
        first = hashlib.sha256(title.encode()).digest()[0] % _HELD_OUT_SHARE
        for index, words in enumerate(passages):
            is_held_out = index % _HELD_OUT_SHARE == first and len(passages) > 1
            (held_out if is_held_out else train).append((title, words))
    known = {title for title, _ in train}
    return Split(_pairs(train), _pairs([pair for pair in held_out if pair[0] in known]))


class DistinctTitles(Sampler[list[int]]):
    """Gives batches in which no title comes twice: a second one would be a wrong answer that fits.

    Items are dealt out like cards, title after title, to as many batches as the longest title has
    items: each item comes once an epoch, and batches are of one size, give or take one.

    Args:
        titles: The title of each item.
        rows: Most items of a batch; a title with many items makes batches smaller.
        generator: Decides the order, another one in each epoch; None keeps that of the items.

    Example:
        >>> list(DistinctTitles("aaabbc", rows=3, generator=None))
        [[0, 3], [1, 4], [2, 5]]
    """

    def __init__(
        self, titles: Sequence[str], *, rows: int, generator: torch.Generator | None
    ) -> None:
        self.rows = rows
        self.generator = generator
        self._by_title: dict[str, list[int]] = {}
        for index, title in enumerate(titles):
            self._by_title.setdefault(title, []).append(index)
        longest = max(map(len, self._by_title.values()), default=0)
        self._num_batches = max(longest, math.ceil(len(titles) / rows))

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        groups = [self._shuffled(group) for group in self._shuffled(list(self._by_title.values()))]
        dealt = list(itertools.chain.from_iterable(groups))
        for first in range(self._num_batches):
            yield dealt[first :: self._num_batches]

    def _shuffled(self, items: list[T]) -> list[T]:
        if self.generator is None:
            return items
        return [items[i] for i in torch.randperm(len(items), generator=self.generator).tolist()]


def loader(data: Pairs, *, rows: int, generator: torch.Generator | None) -> DataLoader[Batch]:
    """Return a loader of batches without a title that comes twice.

    Args:
        data: What to load.
        rows: Most pairs of a batch.
        generator: Decides the order; None keeps that of the data, and leaves every stream alone.

    Example:
        >>> data = pairs_of({"A": "a b c d " * 20, "B": "e f g h " * 20}).train
        >>> [batch["title_ids"].shape for batch in loader(data, rows=8, generator=None)]
        [torch.Size([2, 24]), torch.Size([2, 24]), torch.Size([1, 24])]
    """
    sampler = DistinctTitles(data.titles, rows=rows, generator=generator)
    own = torch.Generator() if generator is None else generator
    return DataLoader(data, batch_sampler=sampler, generator=own)


def _pairs(pairs: Sequence[tuple[str, list[str]]]) -> Pairs:
    return Pairs([title for title, _ in pairs], [words for _, words in pairs])


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]+|__[a-z]+__", text.lower())


def _passages(words: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(words), PASSAGE_WORDS):
        passage = words[begin : begin + PASSAGE_WORDS]
        if len(passage) >= _SHORTEST:
            yield passage


def _ids(words: Sequence[str], length: int) -> Tensor:
    """Number words and pairs of neighbours, and pad with 0. The hash is the same everywhere."""
    pairs = [f"{one} {two}" for one, two in itertools.pairwise(words)]
    numbers = [1 + zlib.crc32(item.encode()) % (VOCAB_SIZE - 1) for item in (*words, *pairs)]
    numbers = numbers[:length]
    return torch.tensor(numbers + [0] * (length - len(numbers)))
