"""The data of the language recipe: what is a target, what is held out, and what a seed decides."""

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from midstep.recipes.corpus import (
    Corpus,
    PackedRows,
    byte_frequency_baseline,
    held_out_loader,
    language_corpus,
    pack,
    reference_topics,
    split_documents,
    training_loader,
    without_copies,
)

# Mostly line ends and short words, so that every way to cut a text is taken; bytes of 2 and 4 too.
TEXT = st.text(alphabet="ab\n\n\n \u00e9\U0001f40d", max_size=60)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return language_corpus()


def documents() -> dict[str, str]:
    return without_copies(reference_topics())


def tensors(data: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
    return data.input_ids, data.labels, data.document_ids


def pieces(data: PackedRows) -> list[bytes]:
    """The runs of one document id, in order, with the padding left out."""
    found = []
    for ids, owners in zip(data.input_ids.tolist(), data.document_ids.tolist(), strict=True):
        for owner, run in itertools.groupby(
            zip(owners, ids, strict=True), key=lambda pair: pair[0]
        ):
            if owner != -1:
                found.append(bytes(byte for _, byte in run))
    return found


def runs_of_eight_words(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}


@given(st.lists(TEXT, max_size=6), st.integers(min_value=2, max_value=30))
def test_every_byte_but_the_first_of_a_text_is_a_target_exactly_once(
    texts: list[str], context: int
) -> None:
    labels = pack(texts, context=context).labels
    assert bytes(labels[labels != -100].tolist()) == b"".join(text.encode()[1:] for text in texts)


@given(st.lists(TEXT, max_size=6), st.integers(min_value=2, max_value=30))
def test_a_target_follows_the_byte_that_precedes_it_in_its_own_text(
    texts: list[str], context: int
) -> None:
    data = pack(texts, context=context)
    encoded = [text.encode() for text in texts if text]
    # Texts are laid in order, so the pieces must spell them, each but a text's first with the last
    # byte of the piece before it once more.
    begin = 0
    for piece in pieces(data):
        assert encoded[0][begin : begin + len(piece)] == piece
        begin += len(piece) - 1
        if begin == len(encoded[0]) - 1:
            begin = 0
            encoded.pop(0)
    assert encoded == []


@given(st.lists(TEXT, max_size=6), st.integers(min_value=2, max_value=30))
def test_labels_are_the_bytes_themselves_except_where_there_is_no_target(
    texts: list[str], context: int
) -> None:
    input_ids, labels, document_ids = tensors(pack(texts, context=context))
    begins = torch.ones_like(labels, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    padding = document_ids == -1
    assert torch.equal(labels == -100, begins | padding)
    assert torch.equal(labels[labels != -100], input_ids[labels != -100])
    assert (input_ids[padding] == 0).all()
    # Padding is the end of a row: after it comes nothing.
    assert not (padding[:, :-1] & ~padding[:, 1:]).any()


def test_no_target_of_the_corpus_crosses_a_document(corpus: Corpus) -> None:
    for data in corpus:
        is_target = data.labels != -100
        assert not is_target[:, 0].any()
        owners = data.document_ids
        assert torch.equal(owners[:, :-1][is_target[:, 1:]], owners[:, 1:][is_target[:, 1:]])
        assert (owners[is_target] >= 0).all()


def test_the_corpus_is_each_document_whole(corpus: Corpus) -> None:
    split = split_documents(documents())
    for data, texts in zip(corpus, split, strict=True):
        assert (data.labels != -100).sum() == sum(len(text.encode()) - 1 for text in texts.values())


def test_documents_share_rows(corpus: Corpus) -> None:
    for data in corpus:
        assert (data.document_ids.amax(dim=1) > 0).any()


def test_numbers_of_targets_differ_between_rows_and_between_microbatches(corpus: Corpus) -> None:
    num_targets = (corpus.train.labels != -100).sum(dim=1)
    assert len(num_targets.unique()) > 100
    assert num_targets.double().std() > 0.1 * num_targets.double().mean()
    microbatches = [
        int((batch["labels"] != -100).sum())
        for batch in training_loader(corpus.train, rows=4, seed=0)
    ]
    windows = [set(microbatches[i : i + 4]) for i in range(0, len(microbatches) - 3, 4)]
    assert all(len(window) > 1 for window in windows)


def test_a_paragraph_stays_whole_where_it_fits() -> None:
    data = pack(["1 2 3 4\n\n5 6 7 8\n\n9\n"], context=16)
    assert pieces(data) == [b"1 2 3 4\n\n", b"\n5 6 7 8\n\n9\n"]


def test_a_long_paragraph_is_cut_between_lines_and_a_long_line_anywhere() -> None:
    assert pieces(pack(["123\n456\n78\n"], context=10)) == [b"123\n456\n", b"\n78\n"]
    assert pieces(pack(["123456789"], context=6)) == [b"12345", b"56789"]


def test_held_out_documents_are_not_trained_on() -> None:
    split = split_documents(documents())
    assert set(split.train).isdisjoint(split.held_out)
    assert split.train | split.held_out == documents()


def test_about_a_tenth_is_held_out() -> None:
    split = split_documents(documents())
    lengths = [sum(map(len, part.values())) for part in split]
    assert 0.09 < lengths[1] / sum(lengths) <= 0.1
    assert len(split.held_out) >= 10


def test_no_held_out_document_is_quoted_in_training() -> None:
    split = split_documents(documents())
    seen = set().union(*map(runs_of_eight_words, split.train.values()))
    for title, text in split.held_out.items():
        runs = runs_of_eight_words(text)
        assert len(runs & seen) <= 0.05 * len(runs), title


def test_a_topic_that_another_quotes_whole_is_dropped() -> None:
    topics = reference_topics()
    dropped = topics.keys() - documents()
    assert {"with", "try", "while", "if", "else", "function", "class"} <= dropped
    # Nothing is lost but the second reading of it.
    kept = [runs_of_eight_words(text) for text in documents().values()]
    for title in dropped:
        runs = runs_of_eight_words(topics[title])
        assert max(len(runs & other) for other in kept) > 0.8 * len(runs), title


def test_of_two_equal_documents_the_first_title_is_kept() -> None:
    assert list(without_copies({"b": "same text", "a": "same text", "c": "other"})) == ["a", "c"]


def test_documents_that_share_a_passage_are_on_the_same_side() -> None:
    shared = " ".join(f"shared{i}" for i in range(20))
    texts = {
        f"{letter}{copy}": " ".join([*(f"{letter}{copy}{i}" for i in range(60)), letter, shared])
        if letter == "a"
        else " ".join(f"{letter}{copy}{i}" for i in range(80))
        for letter in "abcdefgh"
        for copy in range(3)
    }
    for fraction in (0.1, 0.2, 0.3, 0.4, 0.5):
        held_out = split_documents(texts, fraction=fraction).held_out
        assert len({"a0", "a1", "a2"} & held_out.keys()) in {0, 3}


def test_a_seed_orders_the_training_documents_and_leaves_the_held_out_ones_alone() -> None:
    first, again, other = (language_corpus(context=64, seed=seed) for seed in (0, 0, 1))
    for ours, same in zip(first, again, strict=True):
        assert all(map(torch.equal, tensors(ours), tensors(same)))
    assert all(map(torch.equal, tensors(first.held_out), tensors(other.held_out)))
    assert not torch.equal(first.train.input_ids[:10], other.train.input_ids[:10])
    assert torch.equal(
        torch.bincount(first.train.labels[first.train.labels >= 0]),
        torch.bincount(other.train.labels[other.train.labels >= 0]),
    )


FINGERPRINT = """
import hashlib
from midstep.recipes.corpus import language_corpus, training_loader

digest = hashlib.sha256()
for data in (train := language_corpus(context=128, seed=3)):
    for tensor in (data.input_ids, data.labels, data.document_ids):
        digest.update(tensor.numpy().tobytes())
for batch in training_loader(train.train, rows=8, seed=3):
    digest.update(batch["input_ids"].numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_every_process_reads_the_same_corpus_in_the_same_order(hash_seed: str) -> None:
    ours = hashlib.sha256()
    corpus = language_corpus(context=128, seed=3)
    for data in corpus:
        for tensor in tensors(data):
            ours.update(tensor.numpy().tobytes())
    for batch in training_loader(corpus.train, rows=8, seed=3):
        ours.update(batch["input_ids"].numpy().tobytes())
    theirs = subprocess.run(
        [sys.executable, "-c", FINGERPRINT],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert theirs.stdout.strip() == ours.hexdigest()


def test_the_baseline_is_the_closed_form(corpus: Corpus) -> None:
    train, held_out = (
        np.array([label for label in data.labels.flatten().tolist() if label != -100])
        for data in corpus
    )
    counts = np.array([(train == byte).sum() for byte in range(256)], dtype=np.float64)
    probabilities = (counts + 1) / (len(train) + 256)
    expected = -np.log(probabilities[held_out]).mean()
    assert byte_frequency_baseline(*corpus) == pytest.approx(expected, rel=1e-12)
    assert 2.5 < expected < 3.5


def test_the_baseline_of_a_byte_that_was_never_seen_is_finite() -> None:
    assert byte_frequency_baseline(pack(["aaa"]), pack(["zz"])) == pytest.approx(np.log(258))


def test_an_epoch_gives_every_row_once_in_batches_of_the_size_asked_for(corpus: Corpus) -> None:
    data = corpus.held_out
    for loader in (training_loader(data, rows=8, seed=0), held_out_loader(data, rows=8)):
        batches = list(loader)
        assert {len(batch["labels"]) for batch in batches[:-1]} == {8}
        assert len(batches[-1]["labels"]) == (len(data) - 1) % 8 + 1
        given_rows = torch.cat([batch["input_ids"] for batch in batches]).tolist()
        assert sorted(given_rows) == sorted(data.input_ids.tolist())


def test_a_batch_is_three_integer_tensors_of_one_shape(corpus: Corpus) -> None:
    batch = next(iter(training_loader(corpus.train, rows=4, seed=0)))
    assert list(batch) == ["input_ids", "labels", "document_ids"]
    for name in ("input_ids", "labels", "document_ids"):
        assert batch[name].shape == (4, 256)
        assert batch[name].dtype == torch.int64
    assert 0 <= batch["input_ids"].min() <= batch["input_ids"].max() < 256


def test_the_seed_of_a_loader_fixes_the_order_of_all_its_epochs(corpus: Corpus) -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = training_loader(corpus.held_out, rows=8, seed=seed)
        return [
            torch.cat([batch["input_ids"] for batch in loader]).flatten().tolist() for _ in range(2)
        ]

    assert epochs(0) == epochs(0)
    assert epochs(0)[0] != epochs(1)[0]
    assert epochs(0)[0] != epochs(0)[1]


def test_reading_batches_leaves_the_global_generator_alone(corpus: Corpus) -> None:
    before = torch.get_rng_state()
    for loader in (
        training_loader(corpus.train, rows=8, seed=0),
        held_out_loader(corpus.held_out, rows=8),
    ):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("context", [-1, 0, 1])
def test_a_row_too_small_for_a_target_is_refused(context: int) -> None:
    with pytest.raises(ValueError, match=rf"pack\(context={context}\)"):
        pack(["text"], context=context)
    with pytest.raises(ValueError, match=rf"pack\(context={context}\)"):
        language_corpus(context=context)


@pytest.mark.parametrize("fraction", [0.0, 1.0, float("nan")])
def test_a_split_with_an_empty_part_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"split_documents\(fraction={fraction}\)"):
        split_documents({"a": "text"}, fraction=fraction)


def test_the_package_of_recipes_does_not_import_torch() -> None:
    code = "import sys, midstep.recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
