"""Which samples a step has, whoever computes it: no sample lost or seen twice over changes of rank count, stops and resumptions."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
from data_help import counting_stream, make_dataset, make_stream
from hypothesis import given, settings, strategies as st

from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.data.loader import Loader, ValidationLoader
from phalanx.data.packing import IGNORE
from phalanx.data.prefetch import Prefetch

pytestmark = pytest.mark.unit
SEQ = 4


def make_loader(windows=64, *, seed=0, global_batch=16, micro_batch=2, **kwargs):
    dataset = make_dataset([counting_stream(windows, SEQ)], **kwargs)
    return Loader(dataset, seq_len=SEQ, global_batch=global_batch, micro_batch=micro_batch, seed=seed)


def batches_of(loader, step, dp_size):
    return [b for r in range(dp_size) for b in loader.microbatches(step, dp_index=r, dp_size=dp_size)]


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_a_step_is_the_same_for_any_number_of_ranks(dp_size):
    loader = make_loader()
    whole, parts = loader.microbatches(5), batches_of(loader, 5, dp_size)
    assert [b.index for b in parts] == list(range(8))
    for a, b in zip(whole, parts, strict=True):
        assert a.index == b.index and a.segments == b.segments
        for name in ("tokens", "labels", "positions", "sample_ids"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
    assert np.concatenate([b.sample_ids for b in parts]).tolist() == loader.sample_ids(5).tolist()


def test_microbatches_are_those_of_the_contract():
    loader = make_loader()
    ids = loader.sample_ids(3)
    rank_1 = loader.microbatches(3, dp_index=1, dp_size=4)
    assert [b.index for b in rank_1] == [2, 3]
    assert rank_1[0].sample_ids.tolist() == ids[4:6].tolist()
    batch = rank_1[0]
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (2, SEQ)
    assert batch.tokens.tolist() == [[1 + SEQ * i + k for k in range(SEQ)] for i in batch.sample_ids]
    assert len(batch.segments) == 2 and all(type(n) is int for row in batch.segments for n in row)


def test_ranks_4_then_2_then_8_see_every_sample_once():
    windows, plan, seen, step = 96, [(4, 2), (2, 3), (8, 1)], Counter(), 0
    for dp_size, steps in plan:
        loader = make_loader(windows)  # a new process: nothing but seed and step is carried over
        for _ in range(steps):
            seen.update(i for b in batches_of(loader, step, dp_size) for i in b.sample_ids.tolist())
            step += 1
    assert seen == Counter(range(windows))


@given(
    st.integers(1, 120),
    st.integers(0, 1000),
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6),
)
@settings(max_examples=30, deadline=None)
def test_stops_and_other_rank_counts_lose_and_repeat_nothing(windows, seed, lives):
    """Each life runs some steps with its own rank count and is killed; the next goes on from a checkpoint some steps back."""
    committed: dict[int, list[int]] = {}
    step = 0
    for dp_size, steps, lost in lives:
        loader = make_loader(windows, seed=seed)
        saved = loader.state(step)
        for n in range(step, step + steps):
            committed[n] = [i for b in batches_of(loader, n, dp_size) for i in b.sample_ids.tolist()]
        step = make_loader(windows, seed=seed).check_state(saved) + max(steps - lost, 0)
        committed = {n: ids for n, ids in committed.items() if n < step}
    order = [i for n in sorted(committed) for i in committed[n]]
    assert sorted(committed) == list(range(step))
    undisturbed = make_loader(windows, seed=seed)
    assert order == [i for n in range(step) for i in undisturbed.sample_ids(n).tolist()]
    for begin in range(0, len(order) - windows + 1, windows):
        assert sorted(order[begin : begin + windows]) == list(range(windows))


def test_seeds_differ_and_steps_differ():
    a, b = make_loader(640, seed=1), make_loader(640, seed=2)
    assert a.sample_ids(0).tolist() != b.sample_ids(0).tolist()
    assert not set(a.sample_ids(0).tolist()) & set(a.sample_ids(1).tolist())


def test_mixture_of_pools():
    dataset = make_dataset([counting_stream(50, SEQ)], [counting_stream(70, SEQ)], weights=(3.0, 1.0))
    loader = Loader(dataset, seq_len=SEQ, global_batch=100, micro_batch=10, seed=0)
    ids = np.concatenate([loader.sample_ids(n) for n in range(100)])
    assert (ids < 50).sum() == 7500
    assert min(Counter(ids.tolist()).values()) >= 35


def test_streams_of_one_pool_are_one_epoch():
    dataset = make_dataset([counting_stream(5, SEQ), counting_stream(11, SEQ)])
    loader = Loader(dataset, seq_len=SEQ, global_batch=16, micro_batch=16, seed=0)
    assert sorted(loader.sample_ids(0).tolist()) == list(range(16))


# --- state


def test_state_is_a_few_integers_and_comes_back():
    loader = make_loader(seed=7)
    state = loader.state(12)
    assert state == {"seed": 7, "step": 12, "global_batch": 16, "seq_len": SEQ, "data": "f"}
    assert make_loader(seed=7, micro_batch=4).check_state(state) == 12  # micro-batches may change, samples do not


def test_resuming_with_other_samples_names_everything_that_differs():
    state = make_loader(seed=7).state(12)
    with pytest.raises(CheckpointError) as caught:
        make_loader(seed=8, global_batch=32, fingerprint="other").check_state(state)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    for part in ("train.seed = 8", "train.global_batch = 32", "differs from the run", "(16)", "'f'", "changed file"):
        assert part in text


def test_a_state_without_its_entries_is_refused():
    with pytest.raises(CheckpointError, match=r"train\.seed"):
        make_loader().check_state({"step": 3})


@pytest.mark.parametrize(("micro_batch", "dp_size"), [(3, 1), (2, 3), (2, 16)])
def test_a_batch_that_does_not_divide_is_refused(micro_batch, dp_size):
    with pytest.raises(ConfigError, match=r"train.global_batch = 16: must be a multiple .*; for example \d+"):
        make_loader(micro_batch=micro_batch).microbatches(0, dp_size=dp_size)


# --- validation


def make_validation(windows, *, batches, dataset=None):
    dataset = dataset or make_dataset([counting_stream(windows, SEQ)])
    return ValidationLoader(dataset, seq_len=SEQ, global_batch=16, micro_batch=2, batches=batches)


def test_validation_batches_are_fixed_and_distinct():
    loader = make_validation(200, batches=3)
    ids = np.concatenate([loader.sample_ids(n) for n in range(loader.num_batches)])
    assert loader.num_batches == 3 and len(set(ids.tolist())) == 48
    assert ids.tolist() != sorted(ids.tolist())
    for dp_size in (1, 2, 8):
        parts = [b for n in range(3) for b in batches_of(loader, n, dp_size)]
        assert np.concatenate([b.sample_ids for b in parts]).tolist() == ids.tolist()


def test_short_validation_is_filled_up_with_what_predicts_nothing():
    loader = make_validation(21, batches=8)
    assert loader.num_batches == 2
    batches = [b for n in range(2) for b in batches_of(loader, n, 8)]
    ids = np.concatenate([b.sample_ids for b in batches])
    assert sorted(ids[ids >= 0].tolist()) == list(range(21)) and (ids < 0).sum() == 11
    labels = np.concatenate([b.labels for b in batches])
    assert (labels[ids < 0] == IGNORE).all()
    assert (labels != IGNORE).sum() == 21 * SEQ


def test_validation_of_a_mixture_keeps_its_shares():
    dataset = make_dataset([counting_stream(500, SEQ)], [counting_stream(500, SEQ)], weights=(3.0, 1.0))
    loader = make_validation(0, batches=4, dataset=dataset)
    ids = np.concatenate([loader.sample_ids(n) for n in range(loader.num_batches)])
    assert len(ids) == 64 and (ids < 500).sum() == 48


@pytest.mark.parametrize(
    ("sizes", "weights", "drawn"),
    [
        ((5, 500), (0.9, 0.1), (58, 6)),  # 64 windows, although the first source has 5
        ((500, 5), (1.0, 3.0), (16, 48)),
        ((5, 5), (3.0, 1.0), (15, 5)),  # once all were seen, no more
        ((2, 7), (1.0, 1.0), (7, 7)),
    ],
)
def test_a_source_with_too_few_validation_windows_keeps_its_share(sizes, weights, drawn):
    dataset = make_dataset(*([counting_stream(size, SEQ)] for size in sizes), weights=weights)
    loader = make_validation(0, batches=4, dataset=dataset)
    ids = np.concatenate([loader.sample_ids(n) for n in range(loader.num_batches)])
    times = Counter(ids[ids >= 0].tolist())
    of_each = [[times[i] for i in range(sizes[0])], [times[sizes[0] + i] for i in range(sizes[1])]]
    assert tuple(map(sum, of_each)) == drawn and len(ids) == 16 * loader.num_batches
    assert all(max(each) - min(each) <= 1 for each in of_each)


# --- prefetch


def test_prefetch_gives_the_same_steps_in_order():
    loader = make_loader()
    with Prefetch(loader.microbatches, range(3, 9)) as steps:
        got = [[b.sample_ids.tolist() for b in batches] for batches in steps]
    assert got == [[b.sample_ids.tolist() for b in loader.microbatches(n)] for n in range(3, 9)]


def test_prefetch_holds_no_more_than_its_depth():
    loaded = []
    with Prefetch(lambda n: loaded.append(n) or n, range(1000), depth=2) as steps:
        assert next(steps) == 0
        time.sleep(0.3)
        assert len(loaded) <= 4  # one taken, two waiting, one in hand


def test_prefetch_raises_where_the_batch_is_asked_for():
    def load(n):
        if n == 2:
            raise ValueError("no such step")
        return n

    with Prefetch(load, range(5)) as steps:
        assert [next(steps), next(steps)] == [0, 1]
        with pytest.raises(ValueError, match="no such step"):
            next(steps)
        with pytest.raises(StopIteration):
            next(steps)


def test_prefetch_leaves_no_thread_behind():
    before = threading.active_count()
    for taken in range(3):
        steps = Prefetch(lambda n: n, range(100), depth=1)
        for _ in range(taken):
            next(steps)
        steps.close()
        steps.close()
        with pytest.raises(StopIteration):
            next(steps)
    assert threading.active_count() == before


def test_documents_shorter_than_a_sequence_pack_into_one():
    loader = Loader(
        make_dataset([make_stream([[1, 2], [3], [4, 5, 6]])]), seq_len=9, global_batch=1, micro_batch=1, seed=0
    )
    (batch,) = loader.microbatches(0)
    assert batch.segments == ((3, 2, 4),)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3]]
