"""The data of the `language` recipe: the English text of the Python reference, in packed rows.

It decides which text is read, what is held out, where text is cut and which bytes are targets.
The model, the loss and the number of rows in a batch are the caller's. Bytes are the vocabulary,
so there is no tokenizer; the text ships with CPython, so there is no download. It differs a
little from one Python version to the next, and so does every count made from it.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = [
    "Batch",
    "Corpus",
    "PackedRows",
    "Split",
    "byte_frequency_baseline",
    "held_out_loader",
    "language_corpus",
    "pack",
    "reference_topics",
    "split_documents",
    "training_loader",
    "without_copies",
]

VOCAB_SIZE = 256  # every byte; padding needs no id of its own, because nothing reads or predicts it
NO_TARGET = -100  # in `labels`; the `ignore_index` of torch's cross entropy
NO_DOCUMENT = -1  # in `document_ids`, where there is padding

# Topics quote each other: "with" is, word for word, a section of "compound". Of the runs of 8 words
# of the shorter topic, the longer one has at least 0.81 in each of the 23 such pairs of a topic and
# its source, and at most 0.47 in all other pairs (CPython 3.10 to 3.13).
_RUN_WORDS = 8
_COPY_SHARE = 0.65
_KIN_SHARE = 0.05


class Batch(TypedDict):
    """One row, or rows stacked, as the model and the loss read them."""

    input_ids: Tensor  # [..., context] int64, bytes
    labels: Tensor  # [..., context] int64, the byte of that position or `NO_TARGET`; not shifted
    document_ids: Tensor  # [..., context] int64, 0, 1, ... along a row, or `NO_DOCUMENT`


class Split(NamedTuple):
    """Documents by title. No title is in both parts."""

    train: dict[str, str]
    held_out: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows(Dataset[Batch]):
    """Rows of bytes, all of one length; item `i` is row `i`.

    Labels are not shifted: the loss compares the logits of position t with `labels[t + 1]`. The
    first byte of each piece of text has no target, so no byte is predicted from another document.

    Attributes:
        input_ids: Shape [rows, context], int64; bytes, and 0 where there is padding.
        labels: Same shape; equal to `input_ids` where there is a target, else `NO_TARGET`.
        document_ids: Same shape; counts the pieces of text along a row from 0, `NO_DOCUMENT`
            where there is padding.
    """

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> Batch:
        return Batch(
            input_ids=self.input_ids[index],
            labels=self.labels[index],
            document_ids=self.document_ids[index],
        )

    @property
    def targets(self) -> Tensor:
        """The bytes to predict, in order. Shape [targets], int64."""
        return self.labels[self.labels != NO_TARGET]


class Corpus(NamedTuple):
    """Everything the recipe reads, packed."""

    train: PackedRows
    held_out: PackedRows


def language_corpus(*, context: int = 256, seed: int = 0) -> Corpus:
    """Return the Python reference as packed rows, for training and held out.

    Costs about half a second and 24 bytes of memory for each byte of a row.

    Args:
        context: Bytes in a row; at least 2.
        seed: Orders the training documents before they are packed. What is held out, and its
            rows, are the same for every seed.

    Raises:
        ValueError: `context` is too small to hold a byte and its target.

    Example:
        >>> train, held_out = language_corpus(context=64)
        >>> sorted(train[0]), train[0]["labels"].shape
        (['document_ids', 'input_ids', 'labels'], torch.Size([64]))
    """
    documents = split_documents(without_copies(reference_topics()))
    order = list(documents.train)
    random.Random(seed).shuffle(order)
    return Corpus(
        train=pack((documents.train[title] for title in order), context=context),
        held_out=pack(documents.held_out.values(), context=context),
    )


def reference_topics() -> dict[str, str]:
    """Return the topics of the Python reference by title, in the order of their titles.

    Some are quoted whole in others: see `without_copies`.

    Example:
        >>> reference_topics()["pass"].splitlines()[0]
        'The "pass" statement'
    """
    from pydoc_data.topics import topics  # inside: half a megabyte, which no other caller needs

    return dict(sorted(topics.items()))


def without_copies(documents: Mapping[str, str]) -> dict[str, str]:
    """Drop each document that a longer one holds almost word for word.

    Otherwise a held-out section could be read in training, inside of another document, and the
    held-out loss would measure memory. Keeps the order.

    Args:
        documents: Texts by title.

    Example:
        >>> text = "to be or not to be that is the question whether it is nobler"
        >>> list(without_copies({"line": text, "speech": text + " in the mind to suffer"}))
        ['speech']
    """
    runs = {title: _word_runs(text) for title, text in documents.items()}
    kept: list[str] = []
    for title in sorted(documents, key=lambda title: (-len(documents[title]), title)):
        if all(_share(runs[title], runs[longer]) < _COPY_SHARE for longer in kept):
            kept.append(title)
    return {title: text for title, text in documents.items() if title in set(kept)}


def split_documents(documents: Mapping[str, str], *, fraction: float = 0.1) -> Split:
    """Hold out whole documents, the same ones in every process and for every seed.

    Documents that share a passage stay on the same side. The order in which they are considered
    is that of a SHA-256 of their title: arbitrary, but not random.

    Args:
        documents: Texts by title.
        fraction: Largest share of all characters to hold out; in (0, 1). As many documents as fit
            are taken.

    Raises:
        ValueError: `fraction` is outside its range.

    Example:
        >>> documents = {title: title * 9 for title in "abcdefgh"}
        >>> train, held_out = split_documents(documents, fraction=0.3)
        >>> list(train), list(held_out)
        (['a', 'b', 'c', 'e', 'g', 'h'], ['d', 'f'])
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(
            f"`split_documents(fraction={fraction})`: must be in (0, 1), because both parts need "
            "documents. 0.1 is usual."
        )
    num_spare = int(fraction * sum(map(len, documents.values())))
    held_out: set[str] = set()
    for family in sorted(_families(documents), key=lambda family: _digest(min(family))):
        if (length := sum(len(documents[title]) for title in family)) <= num_spare:
            num_spare -= length
            held_out |= family
    return Split(
        train={title: text for title, text in documents.items() if title not in held_out},
        held_out={title: text for title, text in documents.items() if title in held_out},
    )


def pack(texts: Iterable[str], *, context: int = 256) -> PackedRows:
    r"""Lay texts one after the other into rows of `context` bytes.

    A row ends where the next paragraph does not fit, and the rest of it is padding; a paragraph
    longer than a row is cut between its lines, a line longer than a row anywhere. So rows differ
    in their number of targets. A text that goes on in the next row repeats its last byte there,
    so that each byte of a text but the first is a target exactly once.

    Args:
        texts: In the order in which they are laid.
        context: Bytes in a row; at least 2.

    Raises:
        ValueError: `context` is too small to hold a byte and its target.

    Example:
        >>> packed = pack(["one\n\ntwo\n", "3\n"], context=8)
        >>> [bytes(row) for row in packed.input_ids.tolist()]
        [b'one\n\n\x00\x00\x00', b'\ntwo\n3\n\x00']
        >>> packed.document_ids.tolist()
        [[0, 0, 0, 0, 0, -1, -1, -1], [0, 0, 0, 0, 0, 1, 1, -1]]
        >>> packed.labels.tolist()[1]
        [-100, 116, 119, 111, 10, -100, 10, -100]
    """
    if context < 2:
        raise ValueError(
            f"`pack(context={context})`: must be at least 2, because a row must hold a byte and "
            "its target. 256 is usual."
        )
    rows = list(_lay(texts, context))
    shape = len(rows), context
    packed = PackedRows(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        labels=torch.full(shape, NO_TARGET),
        document_ids=torch.full(shape, NO_DOCUMENT),
    )
    for index, pieces in enumerate(rows):
        end = 0
        for document_id, piece in enumerate(pieces):
            begin, end = end, end + len(piece)
            byte_ids = torch.tensor(list(piece))
            packed.input_ids[index, begin:end] = byte_ids
            packed.labels[index, begin + 1 : end] = byte_ids[1:]
            packed.document_ids[index, begin:end] = document_id
    return packed


def training_loader(data: PackedRows, *, rows: int, seed: int) -> DataLoader[Batch]:
    """Return a loader of batches in an order that `seed` fixes, another one in each epoch.

    The last batch of an epoch may have fewer rows; none is dropped.

    Args:
        data: The rows to train on.
        rows: Rows in a batch.
        seed: Of the loader's own generator; torch's global one is left alone.

    Example:
        >>> loader = training_loader(pack(["abc", "de"], context=3), rows=2, seed=0)
        >>> next(iter(loader))["labels"].shape
        torch.Size([2, 3])
    """
    order = torch.Generator().manual_seed(seed)
    return DataLoader(data, batch_size=rows, shuffle=True, generator=order)


def held_out_loader(data: PackedRows, *, rows: int) -> DataLoader[Batch]:
    """Return a loader of all rows in their order.

    Args:
        data: The rows held out.
        rows: Rows in a batch; the last one may have fewer.

    Example:
        >>> loader = held_out_loader(pack(["abc", "de"], context=3), rows=2)
        >>> next(iter(loader))["labels"]
        tensor([[-100,   98,   99],
                [-100,  101, -100]])
    """
    # A loader draws a seed for its workers each time it is iterated, even in order and without
    # workers: from torch's global generator unless it has its own. Then measuring the held-out
    # loss would change the dropout of the training that goes on after it.
    return DataLoader(data, batch_size=rows, generator=torch.Generator())


def byte_frequency_baseline(train: PackedRows, held_out: PackedRows) -> float:
    """Return the held-out loss, in nats per target, of a model that knows only byte frequencies.

        p(byte) = (1 + its number among training targets) / (256 + training targets)

    A model that has learned anything about the order of bytes is below it.

    Args:
        train: Rows whose targets are counted.
        held_out: Rows whose targets are predicted.

    Example:
        >>> train, held_out = pack(["aaaa"]), pack(["ab"])
        >>> byte_frequency_baseline(train, held_out)  # log(256 + 3), as "b" was never a target
        5.5568
    """
    counts = 1.0 + torch.bincount(train.targets, minlength=VOCAB_SIZE).double()
    return float((counts.sum().log() - counts.log())[held_out.targets].mean())


def _lay(texts: Iterable[str], context: int) -> Iterator[list[bytes]]:
    """Yield rows as the pieces of text in them; each piece of a row is from another text."""
    row: list[bytes] = []
    num_free = context
    for text in texts:
        encoded = text.encode()
        begin = end = 0  # of the piece that grows in this row
        for passage in _passages(encoded, max_bytes=context - 1):
            if end - begin + len(passage) > num_free:
                yield [*row, encoded[begin:end]] if end > begin else row
                row, num_free = [], context
                begin = max(end - 1, 0)  # the byte before the first target of the next piece
            end += len(passage)
        if end > begin:
            row.append(encoded[begin:end])
            num_free -= end - begin
    if row:
        yield row


def _passages(encoded: bytes, max_bytes: int) -> Iterator[bytes]:
    """Cut at the end of paragraphs; within longer ones of lines; within longer ones anywhere."""
    for paragraph in re.findall(rb".+?(?:\n\n+|\Z)", encoded, flags=re.DOTALL):
        lines = [paragraph] if len(paragraph) <= max_bytes else paragraph.splitlines(keepends=True)
        for line in lines:
            for begin in range(0, len(line), max_bytes):
                yield line[begin : begin + max_bytes]


def _families(documents: Mapping[str, str]) -> list[set[str]]:
    """Group documents so that those of different groups share next to no run of words."""
    runs = {title: _word_runs(text) for title, text in documents.items()}
    families: list[set[str]] = []
    for title in documents:
        family = {title}
        for other in list(families):
            if any(_share(runs[title], runs[member]) >= _KIN_SHARE for member in other):
                families.remove(other)
                family |= other
        families.append(family)
    return families


def _word_runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {
        tuple(words[begin : begin + _RUN_WORDS])
        for begin in range(max(1, len(words) - _RUN_WORDS + 1))
    }


def _share(some: set[tuple[str, ...]], others: set[tuple[str, ...]]) -> float:
    return len(some & others) / min(len(some), len(others))


def _digest(title: str) -> bytes:
    return hashlib.sha256(title.encode()).digest()
