"""Packing against a definition written token by token."""

import itertools

import numpy as np
import pytest
from data_help import EOS, make_dataset, make_stream
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.data.dataset import pack_ids
from phalanx.data.packing import IGNORE, pack

pytestmark = pytest.mark.unit

document_lists = st.lists(st.lists(st.integers(1, 900), max_size=20), min_size=1, max_size=12)


@st.composite
def streams(draw):
    documents = draw(document_lists)
    bare = draw(st.lists(st.sampled_from(range(len(documents))), unique=True))
    return documents, make_stream(documents, bare=bare, gap=draw(st.integers(0, 3)))


def plain(documents, seq_len):
    """The same sequences, by the definition: [(tokens, labels, positions, segments)]."""
    stream = [(t, i) for i, d in enumerate(documents) for t in [*d, EOS]]
    windows = -(-(len(stream) - 1) // seq_len)
    stream += [(EOS, len(documents))] * (windows * seq_len + 1 - len(stream))
    sequences = []
    for w in range(windows):
        part = stream[w * seq_len : (w + 1) * seq_len + 1]
        tokens = [t for t, _ in part[:-1]]
        labels = [
            b if owner_a == owner_b and owner_b < len(documents) else IGNORE
            for (_, owner_a), (b, owner_b) in itertools.pairwise(part)
        ]
        positions, segments = [], []
        for i, (_, owner) in enumerate(part[:-1]):
            if i == 0 or owner != part[i - 1][1]:
                segments.append(0)
            positions.append(segments[-1])
            segments[-1] += 1
        sequences.append((tokens, labels, positions, tuple(segments)))
    return sequences


@given(streams(), st.integers(1, 17))
@settings(max_examples=times(200, 66), deadline=None)
def test_equals_the_definition(case, seq_len):
    documents, stream = case
    expected = plain(documents, seq_len)
    assert stream.num_windows(seq_len) == len(expected)
    packed = pack(stream, np.arange(len(expected)), seq_len=seq_len)
    for row, (tokens, labels, positions, segments) in enumerate(expected):
        assert packed.tokens[row].tolist() == tokens
        assert packed.labels[row].tolist() == labels
        assert packed.positions[row].tolist() == positions
        assert packed.segments[row] == segments
        behind = (row + 1) * seq_len - sum(len(document) + 1 for document in documents)
        assert packed.padding[row] == max(behind, 0)


@given(streams(), st.integers(1, 17))
@settings(max_examples=times(100, 40), deadline=None)
def test_every_token_but_the_first_of_a_document_is_predicted_once(case, seq_len):
    documents, stream = case
    packed = pack(stream, np.arange(stream.num_windows(seq_len)), seq_len=seq_len)
    predicted = sorted(packed.labels[packed.labels != IGNORE].tolist())
    assert predicted == sorted(t for d in documents for t in [*d, EOS][1:])


@given(streams(), st.integers(1, 17))
@settings(max_examples=50, deadline=None)
def test_types_are_those_of_the_contract(case, seq_len):
    _, stream = case
    packed = pack(stream, np.arange(stream.num_windows(seq_len)), seq_len=seq_len)
    assert packed.tokens.dtype == packed.labels.dtype == packed.positions.dtype == np.int64
    assert all(type(n) is int and n > 0 for row in packed.segments for n in row)
    assert all(sum(row) == seq_len for row in packed.segments)


def test_windows_of_several_streams_and_fillers():
    a, b = make_stream([[1, 2, 3, 4]]), make_stream([[5, 6, 7], [8]])
    dataset = make_dataset([a], [b])
    packed = pack_ids(dataset, np.array([3, -1, 0, 2, 1]), seq_len=2)
    assert packed.tokens.tolist() == [[7, EOS], [EOS, EOS], [1, 2], [5, 6], [3, 4]]
    assert packed.labels[0].tolist() == [EOS, IGNORE]
    assert packed.labels[1].tolist() == [IGNORE, IGNORE]
    assert packed.segments[1] == (2,)
    assert packed.padding == (0, 2, 0, 0, 0)
    assert packed.positions[1].tolist() == [0, 1]


def test_a_stream_shorter_than_a_sequence_is_filled_up():
    packed = pack(make_stream([[7, 8]]), np.array([0]), seq_len=6)
    assert packed.tokens.tolist() == [[7, 8, EOS, EOS, EOS, EOS]]
    assert packed.labels.tolist() == [[8, EOS, IGNORE, IGNORE, IGNORE, IGNORE]]
    assert packed.segments == ((3, 3),) and packed.padding == (3,)


def test_one_token_has_nothing_to_predict():
    assert make_stream([[]]).num_windows(4) == 0
