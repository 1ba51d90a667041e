"""Batches of any shape are cut along rows: every row is in one piece, with what belongs to it."""

import dataclasses
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

import midstep as ms
from midstep.batches import cut_rows, join_rows, num_rows, take_rows

N = 5


def ids(width: int = 1) -> Tensor:
    """N rows that say which row they are."""
    return torch.arange(N).repeat_interleave(width).view(N, width)


def row_numbers(piece: Any) -> list[int]:
    return [int(value) for value in torch.as_tensor(piece).flatten()]


@dataclasses.dataclass
class Plain:
    x: Tensor
    note: str = "shared"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    inner: dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


Classic = namedtuple("Classic", ["x", "y"])  # noqa: PYI024 - the untyped kind is meant


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's output: a mapping that carries something beside its tensors."""

    def __init__(self, data: dict[str, Any], encodings: list[str]) -> None:
        super().__init__(data)
        self.encodings = encodings


# Each with a way to find in a piece the row numbers that it holds.
SHAPES: dict[str, tuple[Any, Any]] = {
    "tensor": (ids(), lambda b: b),
    "one dimension": (torch.arange(N), lambda b: b),
    "array": (np.arange(N), lambda b: b),
    "tuple": ((ids(), ids(2)[:, :1]), lambda b: b[1]),
    "list": ([ids(), ids()], lambda b: b[1]),
    "dict": ({"x": ids(), "y": ids()}, lambda b: b["y"]),
    "ordered": (OrderedDict(x=ids()), lambda b: b["x"]),
    "defaultdict": (defaultdict(list, x=ids()), lambda b: b["x"]),
    "read-only": (types.MappingProxyType({"x": ids()}), lambda b: b["x"]),
    "dataclass": (Plain(ids()), lambda b: b.x),
    "frozen": (Frozen(ids(), {"z": ids()}), lambda b: b.inner["z"]),
    "slotted": (Slotted(ids()), lambda b: b.x),
    "named tuple": (Named(ids(), ids()), lambda b: b.y),
    "classic": (Classic(ids(), ids()), lambda b: b.y),
    "encoding": (Encoding({"x": ids(), "y": ids()}, ["e"]), lambda b: b["y"]),
    "strings": ({"x": ids(), "s": [str(i) for i in range(N)]}, lambda b: [int(s) for s in b["s"]]),
    "string tuple": ((ids(), tuple("01234")), lambda b: [int(s) for s in b[1]]),
    "numbers": ({"x": ids(), "n": list(range(N))}, lambda b: b["n"]),
    "0-d labels": ({"x": ids(), "n": [torch.tensor(i) for i in range(N)]}, lambda b: b["n"]),
    "per-image dicts": (
        {"x": ids(), "t": [{"boxes": torch.full((i + 1, 4), i)} for i in range(N)]},
        lambda b: [int(t["boxes"][0, 0]) for t in b["t"]],
    ),
    "per-image dicts of one size": (
        {"x": ids(), "t": [{"boxes": torch.full((3, 4), i)} for i in range(N)]},
        lambda b: [int(t["boxes"][0, 0]) for t in b["t"]],
    ),
    "per-image dicts of 0-d labels": (
        {"x": ids(), "t": [{"label": torch.tensor(i)} for i in range(N)]},
        lambda b: [int(t["label"]) for t in b["t"]],
    ),
    "images of one size": (
        {"y": ids(), "images": [torch.full((3, 2, 2), i) for i in range(N)]},
        lambda b: [int(image[0, 0, 0]) for image in b["images"]],
    ),
    "samples that were not collated": (
        {"x": ids(), "samples": [(torch.full((3,), i), i) for i in range(N)]},
        lambda b: [int(sample[0][0]) for sample in b["samples"]],
    ),
    "object array": (
        np.array([{"boxes": torch.full((N, 4), i)} for i in range(N)], dtype=object),
        lambda b: [int(t["boxes"][0, 0]) for t in b],
    ),
    "nested": (
        ({"a": [ids(), (ids(), {"b": ids()})]}, Plain(ids())),
        lambda b: b[0]["a"][1][1]["b"],
    ),
}


@pytest.mark.parametrize("rows", range(1, N + 2))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_is_in_one_piece_in_order_and_none_twice(shape: str, rows: int) -> None:
    batch, find = SHAPES[shape]
    pieces = cut_rows(batch, rows)
    assert num_rows(batch) == N
    assert [row for piece in pieces for row in row_numbers(find(piece))] == list(range(N))
    assert [num_rows(piece) for piece in pieces[:-1]] == [rows] * ((N - 1) // rows)
    assert all(type(piece) is type(batch) for piece in pieces)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_taken_in_any_order_and_as_often_as_named(shape: str) -> None:
    batch, rows_of = SHAPES[shape]
    for rows in ([3, 0, 4], [2, 2], [1], list(range(N))):
        assert row_numbers(rows_of(take_rows(batch, rows))) == rows
    assert num_rows(batch) == N


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_that_are_joined_are_the_batch_again(shape: str) -> None:
    batch, rows_of = SHAPES[shape]
    if shape == "images of one size":  # a piece of 3 such images can be read in two ways
        return
    joined = join_rows(cut_rows(batch, 4))
    assert type(joined) is type(batch)
    assert row_numbers(rows_of(joined)) == list(range(N))
    assert num_rows(joined) == N


def test_what_is_taken_is_a_copy() -> None:
    batch = {"x": ids()}
    take_rows(batch, range(N))["x"].zero_()
    assert row_numbers(batch["x"]) == list(range(N))


def test_batches_that_differ_in_more_than_rows_are_not_joined() -> None:
    with pytest.raises(ValueError, match=r"`x` has the shapes \[2, 3\], \[2, 4\]"):
        join_rows([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 4)}])


def test_what_has_no_rows_is_shared_by_the_pieces() -> None:
    scale, text, names = torch.tensor(2.0), "a caption", ("cat", "dog")
    batch = {"x": ids(), "scale": scale, "text": text, "names": names, "size": (2, 3), "n": None}
    for piece in cut_rows(batch, 2):
        assert piece["scale"] is scale
        assert piece["text"] is text
        assert (piece["names"], piece["size"], piece["n"]) == (names, (2, 3), None)


def test_no_row_is_copied_and_the_batch_is_left_as_it_was() -> None:
    batch = Frozen(ids(), {"z": ids()})
    pieces = cut_rows(batch, 2)
    pieces[1].x[0] = 99
    assert batch.x[2] == 99
    assert len(batch.inner["z"]) == N
    encoding = Encoding({"x": ids()}, ["e"])
    assert [piece.encodings for piece in cut_rows(encoding, 3)] == [["e"], ["e"]]
    assert len(encoding["x"]) == N


@given(n=st.integers(1, 9), rows=st.integers(1, 10), kind=st.integers(0, 3))
def test_what_default_collate_makes_is_cut_as_its_samples_were(
    n: int, rows: int, kind: int
) -> None:
    samples: list[Any] = [
        (
            (torch.full((2,), i), str(i)),
            {"x": torch.full((3,), i), "name": str(i)},
            Named(torch.tensor(i), torch.full((1,), i)),
            [torch.full((2,), i), [torch.tensor(i), float(i)]],
        )[kind]
        for i in range(n)
    ]
    pieces = cut_rows(default_collate(samples), rows)
    start = 0
    for piece in pieces:
        expected = default_collate(samples[start : start + rows])
        start += rows
        assert repr(piece) == repr(expected)
    assert start >= n


def test_a_window_by_rows_reads_a_data_loader() -> None:
    data = [(torch.full((4,), float(i)), i % 3, str(i)) for i in range(7)]
    loader = DataLoader(data, batch_size=4)
    model = torch.nn.Linear(4, 3)
    updater = ms.Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[list[str]] = []

    def loss(m: torch.nn.Module, b: Any) -> ms.LossSum:
        seen.append(list(b[2]))
        return ms.cross_entropy(m(b[0]), b[1])

    records = [
        updater.update(window, loss)
        for window in updater.windows(loader, rows=2, count=ms.targets(key=1))
    ]
    assert seen == [["0", "1"], ["2", "3"], ["4", "5"], ["6"]]
    assert [record.denominators["loss"] for record in records] == [4, 3]


# -- refused, because a guess could pair rows that do not belong together -------------------------


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"x": ids(), "y": torch.zeros(4)}, ValueError, r"disagree.*`x` 5, `y` 4"),
        ((ids(), [torch.zeros(4, 1), torch.zeros(4, 2)]), ValueError, "list of 2 items beside 5"),
        ({"x": ids(), "s": ["a", "b"]}, ValueError, "list of 2 items beside 5 rows"),
        ({"s": ["a", "b"], "t": ["a"]}, ValueError, "disagree"),
        ({"size": 3, "name": "x"}, ValueError, "no tensor in it has rows"),
        ([], ValueError, "no tensor in it has rows"),
        (torch.tensor(3.0), ValueError, "no tensor in it has rows"),
        (None, ValueError, "no tensor in it has rows"),
    ],
)
def test_what_has_no_one_number_of_rows_is_refused(
    batch: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cut_rows(batch, 1)


@pytest.mark.parametrize(
    "batch",
    [
        # Images of one size, one dict each: cut as parts, every image would lose its channels.
        [{"image": torch.zeros(3, 8, 8), "label": 1} for _ in range(4)],
        [(torch.zeros(3, 8, 8), 1) for _ in range(4)],
        [Slotted(torch.zeros(3)) for _ in range(4)],
        [torch.zeros(5, 4), torch.zeros(4, 4)],
        [{"boxes": torch.zeros(i, 4)} for i in range(1, 4)],
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="may be one item per row, or parts"):
        cut_rows(batch, 1)
    with pytest.raises(ValueError, match="may be one item per row, or parts"):
        ms.rows()(batch)


def test_what_has_the_same_rows_in_both_readings_is_counted_and_not_cut() -> None:
    # As many boxes in each image as there are images: known to be two rows, not known which.
    batch = {"x": torch.zeros(2, 3), "t": [{"boxes": torch.zeros(2, 4)} for _ in range(2)]}
    assert num_rows(batch) == 2
    assert cut_rows(batch, 2) == [batch]
    with pytest.raises(ValueError, match="A list in the batch has 2 items that hold 2 rows each"):
        cut_rows(batch, 1)


def test_a_tuple_settles_that_it_holds_parts_and_an_object_array_that_it_holds_rows() -> None:
    parts = tuple({"x": torch.arange(4)} for _ in range(4))
    assert [piece[3]["x"].tolist() for piece in cut_rows(parts, 2)] == [[0, 1], [2, 3]]
    rows = np.empty(4, dtype=object)
    rows[:] = [{"x": torch.arange(4)} for _ in range(4)]
    assert [len(piece) for piece in cut_rows(rows, 3)] == [3, 1]


@pytest.mark.parametrize(
    "batch",
    [
        torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        {"x": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)},
    ],
)
def test_what_has_no_rows_to_cut_along_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match="no rows to cut along"):
        cut_rows(batch, 1)
