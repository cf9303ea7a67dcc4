"""Preparing once, in one process or many, undisturbed or killed; and every bad corpus as a clear error."""

import json
import math
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data_help import decoded, finish, start_prepare, stream_documents, wait_for_line, write_megatron
from tokenizers import models, pre_tokenizers

from phalanx.core.config import DataConfig
from phalanx.core.errors import CheckpointError, DataError
from phalanx.data import corpus, preparation, store
from phalanx.data.contents import what_changed
from phalanx.data.loader import Loader
from phalanx.data.preparation import _mixed_counts, prepare

pytestmark = pytest.mark.unit

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "größe",
    "日本",
    "and",
    "numbers",
    "12",
    "345",
    "follow",
]


def text_of(i, length=60):
    state, words = i + 1, []
    for _ in range(length):
        state = state * 1103515245 % 2**31 + 12345
        words.append(WORDS[(state >> 8) % len(WORDS)])
    return f"document {i}: {' '.join(words)}\n"


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


@pytest.fixture
def texts():
    return [text_of(i) for i in range(300)]


@pytest.fixture
def corpus_file(tmp_path, texts):
    return write_jsonl(tmp_path / "corpus.jsonl", texts)


def config(tmp_path, *sources, **settings):
    return DataConfig(sources=tuple(map(str, sources)), cache=str(tmp_path / "cache"), **settings)


def left_over(tmp_path):
    return [p for p in (tmp_path / "cache").rglob("*") if ".tmp" in p.name]


# --- what is prepared


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_all_text_comes_back(tmp_path, corpus_file, texts, tokenizer):
    prepared = prepare(config(tmp_path, corpus_file, tokenizer=tokenizer))
    assert decoded(prepared) == sorted(texts)
    assert prepared.text_bytes == sum(len(t.encode()) for t in texts)
    assert not prepared.reused and prepared.tokenizer.vocab_size <= 300
    assert prepared.train.vocab_size == prepared.tokenizer.vocab_size


def test_a_tokenizer_that_comes_out_smaller_says_so(tmp_path, corpus_file):
    """Also where it was learned before; and not where it has the size asked for."""
    for _ in range(2):
        prepared = prepare(config(tmp_path, corpus_file, tokenizer="bpe:5000"))
        size = prepared.tokenizer.vocab_size
        assert 300 < size < 5000
        assert prepared.notes == (
            f"data.tokenizer = 'bpe:5000' came out with {size} tokens: the text has no more to learn",
        )
    for exact in ("bpe:300", "byte"):
        assert prepare(config(tmp_path, corpus_file, tokenizer=exact)).notes == ()


def test_split_follows_content(tmp_path, texts):
    """About the fraction asked for; adding and moving documents sends none to the other side; no text is on both."""
    settings = {"tokenizer": "byte", "validation_fraction": 0.2}
    few = prepare(config(tmp_path, write_jsonl(tmp_path / "few.jsonl", texts[:100]), **settings))
    many = prepare(config(tmp_path, write_jsonl(tmp_path / "many.jsonl", [*reversed(texts), *texts[:50]]), **settings))

    def side(data):
        return Counter(tuple(d) for pool in data.pools for s in pool for d in stream_documents(s))

    assert 8 <= few.validation.num_documents <= 35
    assert set(side(few.validation)) <= set(side(many.validation))
    assert not set(side(many.train)) & set(side(many.validation))


def test_few_documents_still_have_both_sides(tmp_path, texts):
    two = prepare(config(tmp_path, write_jsonl(tmp_path / "two.jsonl", texts[:2]), tokenizer="byte"))
    assert two.train.num_documents == two.validation.num_documents == 1


def test_one_text_file_is_cut_so_that_it_can_be_split(tmp_path, texts):
    (tmp_path / "book.txt").write_text("".join(texts))
    prepared = prepare(config(tmp_path, tmp_path / "book.txt", tokenizer="byte"))
    assert prepared.validation.num_documents == 1 and prepared.train.num_documents > 10
    assert sum(map(len, decoded(prepared))) == sum(map(len, texts))


def test_empty_documents_are_left_out(tmp_path, texts):
    path = write_jsonl(tmp_path / "a.jsonl", ["", *texts[:9], ""])
    assert decoded(prepare(config(tmp_path, path, tokenizer="byte"))) == sorted(texts[:9])


def test_large_vocabularies_use_four_bytes(tmp_path, corpus_file):
    vocabulary = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000, "document": 70_001}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prepared = prepare(config(tmp_path, corpus_file, tokenizer=str(tmp_path / "tokenizer.json")))
    stream = prepared.train.pools[0][0]
    assert stream.tokens.tokens.dtype == np.uint32 and isinstance(stream.tokens.tokens, np.memmap)
    assert stream_documents(stream)[0][0] == 70_001


def test_unigram_loss_is_the_cross_entropy_of_frequencies(tmp_path, corpus_file):
    prepared = prepare(config(tmp_path, corpus_file, tokenizer="byte", validation_fraction=0.2))
    train, validation = (
        Counter(t for pool in side.pools for s in pool for d in stream_documents(s) for t in d[1:])
        for side in (prepared.train, prepared.validation)
    )
    total = sum(train.values()) + prepared.tokenizer.vocab_size
    expected = -sum(n * math.log((train[t] + 1) / total) for t, n in validation.items()) / sum(validation.values())
    assert prepared.unigram_loss == pytest.approx(expected, rel=1e-12)
    assert 2 < prepared.unigram_loss < math.log(257)


def test_sources_together_and_weighted(tmp_path, texts):
    a, b = (
        write_jsonl(tmp_path / f"{n}.jsonl", part) for n, part in (("a", texts[:100]), ("b", [t * 3 for t in texts]))
    )
    by_size = prepare(config(tmp_path, a, b, tokenizer="byte"))
    assert len(by_size.train.pools) == 1 and len(by_size.train.pools[0]) == 2
    weighted = prepare(config(tmp_path, a, b, tokenizer="byte", weights=(0.5, 0.5)))
    assert weighted.reused and len(weighted.train.pools) == 2 and weighted.train.weights == (0.5, 0.5)
    assert len({by_size.fingerprint, weighted.fingerprint}) == 2
    assert decoded(weighted) == decoded(by_size)
    loader = Loader(weighted.train, seq_len=64, global_batch=10_000, micro_batch=10_000, seed=0)
    first = weighted.train.pool_sizes(64)[0]
    assert (loader.sample_ids(0) < first).sum() == 5000


def test_unigram_loss_of_a_mixture_follows_the_weights(tmp_path):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [name * (20 + i) for i in range(40)])
    losses = [
        prepare(config(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl", tokenizer="byte", weights=w)).unigram_loss
        for w in [(1.0, 1.0), (9.0, 1.0), (99.0, 1.0)]
    ]
    assert losses[0] > losses[1] > losses[2] and losses[0] == pytest.approx(math.log(2), abs=0.25)


def test_counts_of_a_mixture_weigh_each_side_of_a_source_by_its_own_size():
    """Sources of equal weight count alike, however much of either is validation text."""
    mixed = _mixed_counts([np.array([[800, 0], [200, 0]]), np.array([[0, 100], [0, 900]])], (1.0, 1.0))
    assert mixed[:, 0].tolist() == mixed[:, 1].tolist()


# --- Megatron


def test_megatron_with_and_without_eos(tmp_path):
    documents = [[*map(ord, f"document {i}"), *([256] if i % 2 else [])] for i in range(60)]
    write_megatron(tmp_path / "m", documents, sentences=2)
    prepared = prepare(config(tmp_path, tmp_path / "m", tokenizer="byte", validation_fraction=0.2))
    assert decoded(prepared) == sorted(f"document {i}" for i in range(60))
    assert not list((tmp_path / "cache" / "tokens").glob("*/tokens.bin"))  # nothing is copied
    targets = sum(
        len(d) - 1 for side in (prepared.train, prepared.validation) for s in side.pools[0] for d in stream_documents(s)
    )
    (counts,) = (np.load(p) for p in (tmp_path / "cache" / "tokens").glob("*/counts.npy"))
    assert counts.sum() == targets


def test_megatron_beside_text_and_several_pairs(tmp_path, corpus_file, texts):
    (tmp_path / "pairs").mkdir()
    for name in "xy":
        write_megatron(tmp_path / "pairs" / name, [[*map(ord, f"{name}{i}")] for i in range(30)])
    prepared = prepare(config(tmp_path, corpus_file, tmp_path / "pairs", tokenizer="byte", weights=(3.0, 1.0)))
    assert decoded(prepared) == sorted([*texts, *(f"{n}{i}" for n in "xy" for i in range(30))])
    assert len(prepared.train.pools[1]) == 2


def test_megatron_tokens_of_another_tokenizer(tmp_path):
    write_megatron(tmp_path / "m", [[1, 2], [3, 400], [5]])
    with pytest.raises(DataError, match=r"m\.bin:document 1 = 400: is not an id of the tokenizer 'byte'"):
        prepare(config(tmp_path, tmp_path / "m", tokenizer="byte"))
    write_megatron(tmp_path / "n", [[1, 2], [-3, 4]], dtype="<i4", code=4)
    with pytest.raises(DataError, match=r"n\.bin:document 1 = -3"):
        prepare(config(tmp_path, tmp_path / "n", tokenizer="byte"))


def test_no_tokenizer_can_be_trained_on_tokens(tmp_path):
    write_megatron(tmp_path / "m", [[1, 2], [3]])
    with pytest.raises(DataError, match=r"hold tokens and no text.*tokenizer\.json that made"):
        prepare(config(tmp_path, tmp_path / "m"))


# --- what is reused


def test_prepared_once(tmp_path, corpus_file):
    first = prepare(config(tmp_path, corpus_file, tokenizer="bpe:300"))
    phases = []
    again = prepare(config(tmp_path, corpus_file, tokenizer="bpe:300"), progress=lambda phase, *_: phases.append(phase))
    assert again.reused and not phases
    assert again.fingerprint == first.fingerprint and again.train.fingerprint != again.validation.fingerprint
    moved = corpus_file.rename(tmp_path / "moved.jsonl")
    assert prepare(config(tmp_path, moved, tokenizer="bpe:300")).reused


@pytest.mark.parametrize("change", [{"tokenizer": "byte"}, {"validation_fraction": 0.1}, {"tokenizer": "bpe:290"}])
def test_other_settings_are_other_data(tmp_path, corpus_file, change):
    first = prepare(config(tmp_path, corpus_file, tokenizer="bpe:300"))
    other = prepare(config(tmp_path, corpus_file, **{"tokenizer": "bpe:300", **change}))
    assert not other.reused and other.fingerprint != first.fingerprint


def test_a_tokenizer_is_learned_anew_from_another_part_of_the_text(tmp_path, corpus_file):
    for fraction in (0.1, 0.5):
        prepare(config(tmp_path, corpus_file, tokenizer="bpe:300", validation_fraction=fraction))
    assert len(list((tmp_path / "cache" / "tokenizers").glob("[!.]*/"))) == 2


def test_a_tokenizer_learns_nothing_from_validation_text(tmp_path, corpus_file, monkeypatch):
    seen, train_bpe = [], preparation.train_bpe

    def listen(texts, **settings):
        return train_bpe((seen.append(text) or text for text in texts), **settings)

    monkeypatch.setattr(preparation, "train_bpe", listen)
    prepared = prepare(config(tmp_path, corpus_file, tokenizer="bpe:300", validation_fraction=0.5))
    assert 0 < len(seen) <= prepared.train.num_documents


def test_a_tokenizer_with_control_tokens_is_another_one(tmp_path):
    talks = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"word {i * i}"}] for i in range(200)
    ]
    path, template = tmp_path / "talks.jsonl", tmp_path / "plain.jinja"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    template.write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    plain, chatml = (
        prepare(config(tmp_path, path, tokenizer="bpe:300", chat_template=how)).tokenizer
        for how in (str(template), "chatml")
    )
    assert plain.fingerprint != chatml.fingerprint


def test_same_text_gives_the_same_data_in_another_cache(tmp_path, corpus_file):
    """What ranks on hosts without a common disk rely on, a trained tokenizer included."""
    first = prepare(config(tmp_path, corpus_file, tokenizer="bpe:300"))
    second = prepare(config(tmp_path / "other", corpus_file, tokenizer="bpe:300"))
    assert not second.reused and first.fingerprint == second.fingerprint
    assert [s.tokens.tokens.tobytes() for s in first.train.pools[0]] == [
        s.tokens.tokens.tobytes() for s in second.train.pools[0]
    ]


def test_changed_data_cannot_be_resumed(tmp_path, corpus_file, texts):
    def loader():
        data = prepare(config(tmp_path, corpus_file, tokenizer="byte")).train
        return Loader(data, seq_len=32, global_batch=4, micro_batch=2, seed=0)

    state = json.loads(json.dumps(loader().state(7)))
    assert loader().check_state(state) == 7
    write_jsonl(corpus_file, texts[1:])
    with pytest.raises(CheckpointError, match=r"data = .*differs from the run that is to be resumed"):
        loader().check_state(state)


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path, texts):
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    write_jsonl(folder / "a.jsonl", texts)
    assert prepare(config(tmp_path, folder, tokenizer="byte")).notes == ()
    for name in ("deep/b.csv", "c.csv", "README", ".hidden.md"):
        (folder / name).write_text("x")
    told = f"{str(folder)!r} in data.sources holds files that are not read (3: .csv, README)"
    assert prepare(config(tmp_path, folder, tokenizer="byte")).notes == (told,)
    assert prepare(config(tmp_path, folder / "a.jsonl", tokenizer="byte")).notes == ()


def test_what_has_changed_since_a_run_began_is_named(tmp_path, texts):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        write_jsonl(folder / f"{number}.jsonl", texts[number::6])
    cache = tmp_path / "cache"

    def now(**settings):
        return prepare(config(tmp_path, folder, **{"tokenizer": "byte", **settings})).train.fingerprint

    before = now()
    assert what_changed(cache, before, now()) == ""
    (folder / "0.jsonl").unlink()
    write_jsonl(folder / "1.jsonl", texts[2::6])
    write_jsonl(folder / "7.jsonl", texts[:4])
    assert what_changed(cache, before, now()) == "; ".join(
        f"{what}: {(folder / name).resolve()}"
        for what, name in (("changed", "1.jsonl"), ("new", "7.jsonl"), ("gone", "0.jsonl"))
    )
    after = now()
    told = what_changed(cache, after, now(tokenizer="bpe:300", validation_fraction=0.3))
    assert told == "the tokenizer is another one; data.validation_fraction was 0.02"
    for number in range(2, 6):
        with (folder / f"{number}.jsonl").open("a") as file:
            file.write(json.dumps({"text": "more"}) + "\n")
    assert what_changed(cache, after, now()).endswith("4.jsonl and 1 more")
    for strange in (None, 7, "../pins/x", "0" * 32):
        assert what_changed(cache, strange, after) == ""
    (cache / "contents" / f"{after}.json").write_text("{")
    assert what_changed(cache, before, after) == ""
    shutil.rmtree(cache / "contents")
    (cache / "contents").write_text("nothing can be written here, as in a cache that is only read")
    assert now() and what_changed(cache, before, after) == ""


def test_a_damaged_store_is_prepared_anew(tmp_path, corpus_file, texts):
    first = prepare(config(tmp_path, corpus_file, tokenizer="byte"))
    (tokens,) = (tmp_path / "cache" / "tokens").glob("*/tokens.bin")
    os.truncate(tokens, 1000)
    again = prepare(config(tmp_path, corpus_file, tokenizer="byte"))
    assert not again.reused and again.fingerprint == first.fingerprint and decoded(again) == sorted(texts)


# --- files that change meanwhile


@pytest.mark.parametrize(
    ("phase", "tokenizer"),
    [("scan", "byte"), ("tokenise", "byte"), ("scan", "bpe:300"), ("tokenizer", "bpe:300"), ("tokenise", "bpe:300")],
)
def test_text_that_changes_while_it_is_prepared_is_an_error_and_nothing_of_it_is_kept(
    tmp_path, texts, phase, tokenizer
):
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    as_hashed, times = path.read_bytes(), path.stat()
    chosen, done = config(tmp_path, path, tokenizer=tokenizer), []

    def progress(now, read, total):
        if now == phase and not done:
            done.append(now)
            write_jsonl(path, [text.upper() for text in texts] + ["one more"])

    with pytest.raises(DataError, match=r"a\.jsonl.*was changed while it was prepared; the same command again will do"):
        prepare(chosen, progress=progress)
    assert not left_over(tmp_path) and not list((tmp_path / "cache" / "tokens").glob("[!.]*"))
    path.write_bytes(as_hashed)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what would find the identity again, were it kept
    found = prepare(chosen)
    assert decoded(found) == sorted(texts)
    assert found.fingerprint == prepare(config(tmp_path / "fresh", path, tokenizer=tokenizer)).fingerprint


def test_what_a_torn_file_has_wrong_is_told_as_its_change(tmp_path, texts):
    path, done = write_jsonl(tmp_path / "a.jsonl", texts), []

    def progress(now, *_):
        if now == "tokenise" and not done:
            done.append(now)
            path.write_text('{"text": "half a li\n' * 20_000)

    with pytest.raises(DataError) as caught:
        prepare(config(tmp_path, path), progress=progress)
    assert [p.rule for p in caught.value.problems] == ["was changed while it was prepared"]


# --- the built-in corpus over a change of the machine


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A stand-in for the interpreter's folders, so that packages can be installed."""
    root = tmp_path / "packages"
    for i in range(30):
        (root / f"p{i}").mkdir(parents=True)
        (root / f"p{i}" / "module.py").write_text(text_of(i))
    monkeypatch.setattr(corpus, "python_folders", lambda: (root,))
    return root


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_a_resumed_run_keeps_its_builtin_corpus(tmp_path, packages, tokenizer):
    recipe = config(tmp_path, "builtin:python", tokenizer=tokenizer)
    first = prepare(recipe)
    (packages / "new.py").write_text(text_of(99))
    fresh = prepare(recipe)
    assert fresh.train.fingerprint != first.train.fingerprint
    resumed = prepare(recipe, resume=first.train.fingerprint)
    assert resumed.reused and resumed.fingerprint == first.fingerprint and decoded(resumed) == decoded(first)
    assert prepare(recipe, resume="unknown").fingerprint == fresh.fingerprint


def test_another_size_is_another_builtin_corpus_for_a_resumed_run_too(tmp_path, packages):
    """A setting is never ignored: the loader refuses the other text, and the change is named."""
    small, large = (config(tmp_path, "builtin:python", tokenizer="byte", builtin_bytes=size) for size in (1_000, 2_000))
    first = prepare(small).train.fingerprint
    other = prepare(large, resume=first).train.fingerprint
    assert other != first and prepare(small, resume=first).train.fingerprint == first
    assert what_changed(tmp_path / "cache", first, other) == "data.builtin_bytes was 1000"
    path = tmp_path / "cache" / "pins" / f"{first}.json"
    path.write_text(json.dumps({"builtin:python": next(iter(json.loads(path.read_text()).values()))}))
    (packages / "new.py").write_text(text_of(99))
    assert prepare(small, resume=first).train.fingerprint == first  # by a file of an earlier version


@pytest.mark.parametrize("lost", ["tokens", "tokenizers"])
def test_without_its_cache_a_run_gets_the_corpus_of_today(tmp_path, packages, lost):
    recipe = config(tmp_path, "builtin:python", tokenizer="bpe:300")
    first = prepare(recipe)
    (packages / "new.py").write_text(text_of(99))
    shutil.rmtree(tmp_path / "cache" / lost)
    resumed = prepare(recipe, resume=first.train.fingerprint)
    assert resumed.train.fingerprint != first.train.fingerprint and len(decoded(resumed)) == 31


# --- many processes, killed processes


def recipe_for_child(tmp_path, corpus_file, **settings):
    return {"sources": [str(corpus_file)], "cache": str(tmp_path / "cache"), "tokenizer": "bpe:400", **settings}


def test_four_processes_prepare_once(tmp_path, texts):
    corpus_file = write_jsonl(tmp_path / "large.jsonl", [t * 12 for t in texts])
    children = [start_prepare(recipe_for_child(tmp_path, corpus_file)) for _ in range(4)]
    ends = [finish(c) for c in children]
    assert [code for code, _ in ends] == [0, 0, 0, 0], ends
    results = [json.loads(out.splitlines()[-1]) for _, out in ends]
    assert len({r["fingerprint"] for r in results}) == 1
    assert sum("tokenise" in r["phases"] for r in results) == sum("tokenizer" in r["phases"] for r in results) == 1
    assert sum(not r["reused"] for r in results) == 1
    assert not left_over(tmp_path)


@pytest.mark.parametrize("phase", ["scan", "tokenizer", "tokenise"])
def test_killed_while_preparing_then_prepared(tmp_path, corpus_file, texts, phase):
    recipe = recipe_for_child(tmp_path, corpus_file)
    code, out = finish(start_prepare(recipe, kill_in=phase))
    assert code == -9, out
    assert not [p for p in (tmp_path / "cache").glob("tokens/*") if store.is_complete(p)]
    prepared = prepare(config(tmp_path, corpus_file, tokenizer="bpe:400"))
    assert decoded(prepared) == sorted(texts)
    assert not left_over(tmp_path)
    undisturbed = prepare(config(tmp_path / "other", corpus_file, tokenizer="bpe:400"))
    assert undisturbed.fingerprint == prepared.fingerprint


def test_a_waiting_process_takes_over_from_a_killed_one(tmp_path, corpus_file):
    recipe, go = recipe_for_child(tmp_path, corpus_file), tmp_path / "go"
    doomed = start_prepare(recipe, kill_in="tokenise", wait_for=go)
    wait_for_line(doomed, "about to die")
    waiting = [start_prepare(recipe) for _ in range(2)]
    for child in waiting:
        wait_for_line(child, "phase wait")
    go.touch()
    ends = [finish(c) for c in waiting]
    assert finish(doomed)[0] == -9
    assert [code for code, _ in ends] == [0, 0], ends
    results = [json.loads(out.splitlines()[-1]) for _, out in ends]
    assert len({r["fingerprint"] for r in results}) == 1
    assert sorted(r["reused"] for r in results) == [False, True]
    assert not left_over(tmp_path)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, texts):
    """A limit on file size stands in for the disk: the same failing write."""
    corpus_file = write_jsonl(tmp_path / "large.jsonl", [t * 12 for t in texts])
    recipe = recipe_for_child(tmp_path, corpus_file, tokenizer="byte")
    code, out = finish(start_prepare(recipe, file_limit=100_000))
    assert code == 2 and "data.cache" in out and "free some space" in out, out
    assert not left_over(tmp_path)
    assert prepare(config(tmp_path, corpus_file, tokenizer="byte")).train.num_tokens > 100_000


def test_a_cache_that_cannot_be_made_is_a_clear_error(tmp_path, corpus_file):
    (tmp_path / "loop").symlink_to("loop")
    for cache in (corpus_file, tmp_path / "loop", tmp_path / ("x" * 300), "/proc/none"):
        with pytest.raises(DataError, match=r"must be a folder that can be written.*--data\.cache"):
            prepare(DataConfig(sources=(str(corpus_file),), tokenizer="byte", cache=str(cache)))


# --- bad input


def test_bad_lines_of_all_files_are_named_together(tmp_path, texts):
    a = write_jsonl(tmp_path / "a.jsonl", texts[:20])
    a.write_text(a.read_text() + "{broken\n")
    (tmp_path / "b.txt").write_bytes(b"fine\n" * 10 + b"bro\xffken\n")
    for tokenizer in ("byte", "bpe:300"):
        with pytest.raises(DataError) as caught:
            prepare(config(tmp_path, a, tmp_path / "b.txt", tokenizer=tokenizer))
        places = [p.where for p in caught.value.problems]
        assert places == [f"{a}:21", f"{tmp_path / 'b.txt'}:11"]
        assert not left_over(tmp_path)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe:300"])
def test_alike_lines_of_several_sources_are_counted_together(tmp_path, tokenizer):
    files = [tmp_path / f"{name}.jsonl" for name in "abcd"]
    for path in files:
        path.write_text("{broken\n" * 6)
    with pytest.raises(DataError) as caught:
        prepare(config(tmp_path, *files[:2], tokenizer=tokenizer))
    places = [p.where for p in caught.value.problems]
    assert places == [*(f"{files[0]}:{line}" for line in (1, 2, 3)), f"9 more, the last of them {files[1]}:6"]
    with pytest.raises(DataError, match="reading stopped after 20 wrong places") as caught:
        prepare(config(tmp_path, *files, tokenizer=tokenizer))
    assert caught.value.problems[-1].where == f"17 more, the last of them {files[3]}:2"


@pytest.mark.parametrize("content", ["", '{"text": ""}\n' * 3])
def test_an_empty_data_set(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"holds no text"):
        prepare(config(tmp_path, tmp_path / "a.jsonl", tokenizer="byte"))
    with pytest.raises(DataError, match=r"holds no text"):
        prepare(config(tmp_path, tmp_path / "a.jsonl"))


def test_an_empty_token_set(tmp_path):
    write_megatron(tmp_path / "m", [])
    with pytest.raises(DataError, match=r"holds no text; name files with tokens"):
        prepare(config(tmp_path, tmp_path / "m", tokenizer="byte"))


@pytest.mark.parametrize("texts_", [["only one"], ["the same"] * 5])
def test_too_few_documents_to_split(tmp_path, texts_):
    path = write_jsonl(tmp_path / "a.jsonl", texts_)
    with pytest.raises(DataError, match=r"too few different documents to have validation text"):
        prepare(config(tmp_path, path, tokenizer="byte"))


def test_a_weighted_source_without_validation_text(tmp_path, corpus_file):
    lone = write_jsonl(tmp_path / "lone.jsonl", ["only one"])
    assert prepare(config(tmp_path, corpus_file, lone, tokenizer="byte")).validation.num_documents
    with pytest.raises(DataError, match=r"lone\.jsonl.*too few different documents"):
        prepare(config(tmp_path, corpus_file, lone, tokenizer="byte", weights=(1.0, 1.0)))


def test_sources_and_tokenizer_are_reported_together(tmp_path):
    with pytest.raises(DataError) as caught:
        prepare(config(tmp_path, "gone.jsonl", tokenizer="bpe:9"))
    assert [p.where for p in caught.value.problems] == ["data.sources[0]", "data.tokenizer"]
    assert not Path(tmp_path / "cache").exists()


def store_of(cache):
    (meta,) = cache.rglob("meta.json")
    return meta.parent


def test_tokens_altered_in_the_cache_are_refused_and_then_made_anew(tmp_path, corpus_file):
    asked = config(tmp_path, corpus_file)
    first = prepare(asked)
    folder = store_of(tmp_path / "cache")
    sound = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(bytes(b ^ 1 for b in sound))
    damaged = prepare(asked)
    loader = Loader(damaged.train, seq_len=32, global_batch=2, micro_batch=2, seed=0)
    with pytest.raises(DataError, match=r"tokens.bin: was altered since it was prepared.*start again: it is made anew"):
        loader.microbatches(0)
    again = prepare(asked)
    assert not again.reused and again.fingerprint == first.fingerprint
    assert (folder / "tokens.bin").read_bytes() == sound
    Loader(again.train, seq_len=32, global_batch=2, micro_batch=2, seed=0).microbatches(0)


@pytest.mark.parametrize("name", ["0.train.begin.npy", "0.train.offset.npy", "0.sums.npy", "counts.npy", "meta.json"])
def test_whatever_else_is_altered_is_made_anew_at_the_start(tmp_path, corpus_file, name):
    asked = config(tmp_path, corpus_file)
    prepare(asked)
    path = store_of(tmp_path / "cache") / name
    sound = path.read_bytes()
    path.write_bytes(sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:])
    assert not prepare(asked).reused and path.read_bytes() == sound


@pytest.mark.parametrize("name", ["0.train.begin.npy", "meta.json"])
def test_what_is_as_written_at_the_second_read_is_kept(tmp_path, corpus_file, name, monkeypatch):
    asked = config(tmp_path, corpus_file)
    prepare(asked)
    path = store_of(tmp_path / "cache") / name
    sound = path.read_bytes()
    path.write_bytes(sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:])
    monkeypatch.setattr(store, "forget", lambda file: file != path or path.write_bytes(sound))
    assert prepare(asked).reused


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("bare", [None, np.array([False, True, False, False, True])])
def test_documents_outside_of_the_tokens_are_found_in_every_part_of_a_table(at, bare, monkeypatch):
    monkeypatch.setattr(store, "_CHUNK_DOCUMENTS", 2)
    offset = np.arange(6) * 10
    begin = offset[:-1].copy()
    assert store._are_inside(begin, offset, bare, 50)
    for value in (-1, 50, 2**63 - 6):
        assert not store._are_inside(np.where(np.arange(5) == at, value, begin), offset, bare, 50)
    for value in (-1, 2**63 - 6, -(2**63)):
        assert not store._are_inside(begin, np.where(np.arange(6) == at, value, offset), bare, 50)


def test_a_cache_of_an_earlier_version_is_read(tmp_path, corpus_file):
    """It has no checksums; tokens outside of the vocabulary are an error all the same."""
    asked = config(tmp_path, corpus_file, tokenizer="byte")
    prepare(asked)
    folder = store_of(tmp_path / "cache")
    meta = json.loads((folder / "meta.json").read_text())
    old = {k: v for k, v in meta.items() if k not in ("sums", "checksum")} | {
        "sizes": {k: v for k, v in meta["sizes"].items() if "sums" not in k}
    }
    (folder / "0.sums.npy").unlink()
    (folder / "meta.json").write_text(json.dumps(old))
    prepared = prepare(asked)
    assert prepared.reused
    (folder / "tokens.bin").write_bytes(b"\xff\xff" * (meta["sizes"]["tokens.bin"] // 2))
    loader = Loader(prepare(asked).train, seq_len=32, global_batch=2, micro_batch=2, seed=0)
    with pytest.raises(
        DataError, match=r"tokens.bin = 65535: token \d+ of the file is none of the vocabulary, whose ids are below 257"
    ):
        loader.microbatches(0)


def test_megatron_tokens_that_were_altered_are_refused(tmp_path):
    write_megatron(tmp_path / "a", [[i % 250, 1, 2, 256] for i in range(50)])
    asked = config(tmp_path, tmp_path / "a.bin", tokenizer="byte")
    prepare(asked)
    kept = (tmp_path / "a.bin").stat()
    data = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(tmp_path / "a.bin", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    for _ in range(2):
        loader = Loader(prepare(asked).train, seq_len=8, global_batch=2, micro_batch=2, seed=0)
        with pytest.raises(
            DataError, match=r"a.bin: was altered since it was prepared.*copy the file again, or change its time"
        ):
            loader.microbatches(0)
