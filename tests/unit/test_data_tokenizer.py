"""Text survives tokenization, control tokens are never read out of text, and errors name the way out."""

import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tiers import times
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from phalanx.api.runs import RunHandle
from phalanx.cli.generate import GenerateArgs, continuation, decoded
from phalanx.core.config import DataConfig
from phalanx.core.errors import DataError
from phalanx.data.formats import Document
from phalanx.data.problems import ProblemLog
from phalanx.data.tokenising import tokenise
from phalanx.data.tokenizer import (
    EOS,
    Beginnings,
    ByteTokenizer,
    FileTokenizer,
    beginnings,
    continued,
    load_tokenizer,
    parse_choice,
    read_tokenizer_file,
    train_bpe,
)
from phalanx.train.loop import Trainer

pytestmark = pytest.mark.unit

SAMPLE = ["def add(a, b):\n    return a + b\n", "für alle Fälle: 日本語, emoji 🎉 and more words\n"] * 50
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe():
    return FileTokenizer(train_bpe(SAMPLE, vocab_size=300), eos_token=EOS, name="bpe")


@given(any_text)
@settings(max_examples=times(200, 66), deadline=None)
def test_round_trips(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.eos_id not in ids and (ids < tokenizer.vocab_size).all() and (ids >= 0).all()
        assert [b.tolist() for b in tokenizer.encode_batch([text, "", text])] == [ids.tolist(), [], ids.tolist()]


def test_bytes_are_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3, 0xA9, 256, 300, -1, 65]) == "éA"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_bpe_size_and_training_are_deterministic(bpe):
    again = FileTokenizer(train_bpe(SAMPLE, vocab_size=300), eos_token=EOS, name="bpe")
    assert again.fingerprint == bpe.fingerprint
    assert bpe.vocab_size == 300
    assert len(bpe.encode(SAMPLE[0])) <= len(SAMPLE[0]) / 2
    assert FileTokenizer(train_bpe(["ab"], vocab_size=400), eos_token=EOS, name="x").vocab_size < 400


def test_text_without_spaces_is_learned_in_reasonable_time():
    genome = "".join(random.Random(0).choices("ACGT", k=100_000))
    words = [
        " ".join(genome[i : i + 8] for i in range(0, len(genome), 8))
    ]  # the same letters with spaces: what the machine needs for text

    def spent_s(texts: list[str]) -> float:
        began = time.process_time()
        made.append(FileTokenizer(train_bpe(texts, vocab_size=1000), eos_token=EOS, name="bpe"))
        return time.process_time() - began

    made: list[FileTokenizer] = []
    assert spent_s([genome]) < 10 * spent_s(words)  # 0.1 s each; forty times as long if runs were not cut
    tokenizer = made[0]
    ids = tokenizer.encode(genome)
    assert len(ids) < len(genome) / 3 and tokenizer.decode(ids.tolist()) == genome


def test_text_that_spells_a_control_token_is_text(bpe):
    text = f"before{EOS}after"
    assert bpe.eos_id not in bpe.encode(text) and bpe.decode(bpe.encode(text).tolist()) == text


def test_ids_beyond_the_vocabulary_are_no_text(bpe):
    """A model's vocabulary is rounded up; the rows above ours may be sampled."""
    ids = bpe.encode("words")
    assert bpe.decode([*ids.tolist(), 5000, bpe.eos_id, -3]) == "words"


def test_save_and_load(tmp_path, bpe):
    for i, tokenizer in enumerate((ByteTokenizer(), bpe)):
        folder = tmp_path / str(i)
        folder.mkdir()
        tokenizer.save(folder)
        loaded = load_tokenizer(folder)
        assert loaded.fingerprint == tokenizer.fingerprint and loaded.name == tokenizer.name
        assert loaded.encode("für alle").tolist() == tokenizer.encode("für alle").tolist()


def test_loading_what_is_no_tokenizer(tmp_path):
    with pytest.raises(DataError, match="no readable tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_meta.json").write_text('{"kind": "file", "eos_token": "x", "name": "y"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="no readable tokenizer"):
        load_tokenizer(tmp_path)


# --- a tokenizer.json from elsewhere


def write_foreign(folder, special, **files):
    """A word-level tokenizer that adds a start token, pads and truncates, as some do."""
    vocabulary = {t: i for i, t in enumerate(["[UNK]", *special, "hello", "world"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 1)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


def test_only_the_text_is_encoded(tmp_path):
    tokenizer = read_tokenizer_file(write_foreign(tmp_path / "a", ["<s>", "</s>"]), eos_token=None)
    assert tokenizer.encode("hello world hello").tolist() == [3, 4, 3]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["hello", "hello world world"])] == [[3], [3, 4, 4]]
    assert tokenizer.eos_id == 2 and tokenizer.name == "a" and tokenizer.vocab_size == 5


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config": {"eos_token": "<end>"}}, "<end>"),
        ({"tokenizer_config": {"eos_token": {"content": "<end>", "lstrip": False}}}, "<end>"),
        ({"special_tokens_map": {"eos_token": "<end>"}}, "<end>"),
        ({"config": {"eos_token_id": 3}}, "<end>"),
        ({"generation_config": {"eos_token_id": [3, 1]}}, "<end>"),
        ({"tokenizer_config": {"eos_token": None}}, "</s>"),
        ({}, "</s>"),
    ],
)
def test_eos_is_what_the_files_name(tmp_path, files, eos):
    path = write_foreign(tmp_path, ["<s>", "</s>", "<end>"], **files)
    tokenizer = read_tokenizer_file(path, eos_token=None)
    assert tokenizer.eos_id == {"</s>": 2, "<end>": 3}[eos]
    assert read_tokenizer_file(path, eos_token="<s>").eos_id == 1


def test_eos_problems(tmp_path):
    with pytest.raises(DataError, match=r"no end-of-document token .* data\.eos_token"):
        read_tokenizer_file(write_foreign(tmp_path / "a", []), eos_token=None)
    path = write_foreign(tmp_path / "b", ["<s>", "<end>"])
    with pytest.raises(DataError, match=r"no token '<ends>' .*'<end>'"):
        read_tokenizer_file(path, eos_token="<ends>")


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        ({}, None),
        ({"add_bos_token": True, "bos_token": {"content": "<b>"}}, "<b>"),
        ({"add_bos_token": False, "bos_token": "<s>"}, ""),
        ({"add_bos_token": True}, ""),
        ({"add_bos_token": True, "bos_token": "<nowhere>"}, ""),
        ({"add_bos_token": None, "bos_token": "<b>"}, None),
    ],
)
def test_the_token_that_the_files_of_a_tokenizer_put_before_texts(tmp_path, config, flag):
    """The flag counts more than the template."""
    path = write_foreign(tmp_path, ["<s>", "</s>", "<b>"], tokenizer_config=config)
    found = beginnings(path)
    assert (found.flag, found.template) == (flag, "<s>") and found.taken == ("<s>" if flag is None else flag)
    nothing = Beginnings(flag=None, template="")
    assert beginnings(write_foreign(tmp_path / "none", [])) == nothing
    (tmp_path / "none" / "tokenizer.json").write_text("{")
    assert beginnings(tmp_path / "none" / "tokenizer.json") == beginnings(tmp_path / "none" / "nowhere.json") == nothing


def test_texts_begin_with_the_token_that_is_named(tmp_path):
    """Documents and nothing else: `encode` adds none. Without one the ids of tokenizers are as they were, and so are caches."""
    path = write_foreign(tmp_path / "a", ["<s>", "</s>"])
    plain, named = (read_tokenizer_file(path, eos_token=None, bos_token=token) for token in (None, "<s>"))
    assert (plain.bos_id, named.bos_id) == (None, 1) and named.encode("hello").tolist() == [3]
    assert plain.fingerprint == FileTokenizer(path.read_text(), eos_token="</s>", name="x").fingerprint
    assert named.fingerprint != plain.fingerprint
    for tokenizer in (plain, named):
        tokenizer.save(tmp_path)
        again = load_tokenizer(tmp_path)
        assert (again.bos_id, again.fingerprint) == (tokenizer.bos_id, tokenizer.fingerprint)
    for tokenizer, begin in ((plain, []), (named, [1])):
        texts = [Document(text, "here", 0) for text in ("hello world", "world")]
        part = tokenise(tmp_path, texts, tokenizer, conversations=False, template=None, log=ProblemLog())
        assert part.tokens.tolist() == [*begin, 3, 4, 2, *begin, 4, 2] and part.length.tolist() == [
            3 + len(begin),
            2 + len(begin),
        ]
    with pytest.raises(
        DataError, match=r"no token '<ss>' to begin documents with; name another with data\.bos_token; .*'<s>'"
    ):
        read_tokenizer_file(path, eos_token=None, bos_token="<ss>")


def test_a_file_that_is_no_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in ("{", "{}", "hello"):
        path.write_text(content)
        with pytest.raises(DataError, match=r"is not a Hugging Face tokenizer\.json"):
            read_tokenizer_file(path, eos_token=None)


def test_the_same_text_gives_the_same_ids_whatever_dropout_the_file_names(bpe, tmp_path):
    """transformers would draw: the prepared data would be others in each cache, under one fingerprint."""
    bpe.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    drawing = read_tokenizer_file(tmp_path / "tokenizer.json", eos_token=None)
    text = "the quick brown fox jumps over the lazy dog " * 5
    expected = bpe.encode(text).tolist()
    assert all(drawing.encode(text).tolist() == expected for _ in range(5))
    assert drawing.encode_rendered([text], [""])[0].tolist() == expected


# --- data.tokenizer


def test_choices(tmp_path):
    path = write_foreign(tmp_path, ["</s>"])
    assert parse_choice(DataConfig(tokenizer="byte")) is None
    assert parse_choice(DataConfig(tokenizer="bpe:4096")) == 4096
    assert parse_choice(DataConfig(tokenizer=str(path))) == path
    assert parse_choice(DataConfig(tokenizer=str(tmp_path), eos_token="</s>")) == path


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"tokenizer": "bpe:100"}, r"at least 257 tokens.*bpe:8192"),
        ({"tokenizer": "bpe:many"}, r"data\.tokenizer = 'bpe:many'"),
        ({"tokenizer": "bytes"}, r"did you mean 'byte'"),
        ({"tokenizer": "gone/tokenizer.json"}, r"legal: byte, bpe:8192, or the path"),
        ({"tokenizer": "byte", "eos_token": "<end>"}, r"data\.eos_token = '<end>': has no effect"),
    ],
)
def test_wrong_choices(settings_, message):
    with pytest.raises(DataError, match=message):
        parse_choice(DataConfig(**settings_))


def test_everything_wrong_with_a_choice_at_once():
    with pytest.raises(DataError) as caught:
        parse_choice(DataConfig(tokenizer="bpe:1", eos_token="x"))
    assert len(caught.value.problems) == 2


def test_an_altered_tokenizer_is_refused(bpe, tmp_path):
    bpe.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == bpe.fingerprint
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace('"content":', '"content" :', 1))
    with pytest.raises(DataError, match=r"tokenizer.json = '[0-9a-f]{16}': was written with checksum [0-9a-f]{16}"):
        load_tokenizer(tmp_path)
    meta = json.loads((tmp_path / "tokenizer_meta.json").read_text())
    (tmp_path / "tokenizer_meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k != "sum"}))
    load_tokenizer(tmp_path)  # one of an earlier version


def test_a_panic_of_the_library_is_a_sentence(bpe, monkeypatch):
    class Panic(BaseException):
        """As pyo3's PanicException is none of Exception."""

    class Library:
        def encode(self, *args, **options):
            raise Panic("index out of bounds\nmore")

    monkeypatch.setattr(bpe, "_tokenizer", Library())
    with pytest.raises(DataError, match=r"bpe: the library of tokenizers failed: index out of bounds$"):
        bpe.encode("a")


def test_ids_without_bound_are_refused(bpe, tmp_path):
    table = json.loads(bpe._content)
    table["model"]["vocab"]["Ġnew"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match="ids below 10000000"):
        read_tokenizer_file(tmp_path / "tokenizer.json", eos_token=None)


# --- how a model goes on


def mixtral() -> FileTokenizer:
    """As the tokenizer.json of Llama 2 and Mixtral: each word has the blank before it, the one that begins a text is left out, and bytes stand for what has no token."""
    words = ["▁the", "▁quick", "▁brown", "▁fox", "es", "▁"]
    vocabulary = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *words, *(f"<0x{b:02X}>" for b in range(256))])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return FileTokenizer(made.to_str(), eos_token="</s>", name="mixtral", bos_token="<s>")


THE, QUICK, FOX, ES, BYTE = 3, 4, 6, 7, 9


def test_what_goes_on_keeps_the_blank_before_it() -> None:
    """Decoded by itself it began without, so that 'the' + 'quick' was 'thequick'."""
    tokenizer = mixtral()
    assert continued(tokenizer, [1, THE], [QUICK, FOX]) == ("the", " quick fox")
    assert continued(tokenizer, [1, THE, FOX], [ES]) == ("the fox", "es")
    assert continued(tokenizer, [1], [THE, FOX]) == ("", "the fox")
    assert continued(tokenizer, [1, THE], []) == ("the", "")
    assert list(decoded([QUICK, FOX, 2, ES], tokenizer, {2}, prompt=[THE])) == [" quick", " quick fox", " quick fox"]


@given(st.lists(st.integers(0, BYTE + 255), max_size=12), st.lists(st.integers(0, BYTE + 255), max_size=12))
@settings(max_examples=200, deadline=None)
def test_no_text_is_lost_between_a_prompt_and_what_goes_on(prompt, new) -> None:
    """Whatever bytes either has."""
    tokenizer = mixtral()
    whole = tokenizer.decode([*prompt, *new])
    assert "".join(continued(tokenizer, prompt, new)) == whole
    *_, text = decoded(new, tokenizer, (), prompt=prompt)
    assert whole.endswith(text)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), mixtral()], ids=["byte", "fallback"])
def test_a_character_that_the_prompt_begins_is_completed(tokenizer) -> None:
    first = BYTE if tokenizer.name == "mixtral" else 0
    euro = [first + byte for byte in "€".encode()]
    for cut in (1, 2):
        assert continued(tokenizer, euro[:cut], euro[cut:]) == ("", "€")
        assert list(decoded(euro[cut:], tokenizer, (), prompt=euro[:cut])) == ["€", "€"]
    before, rest = continued(tokenizer, euro[:1], euro[1:2])
    assert set(before + rest) == {"\ufffd"}


@pytest.mark.parametrize(("chat", "text"), [(False, " quick"), (True, "quick")])
def test_a_run_goes_on_with_its_blank(chat: bool, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is a text by itself."""
    recipe = SimpleNamespace(data=SimpleNamespace(chat_template="x"), train=SimpleNamespace(seq_len=8))
    loaded = SimpleNamespace(recipe=recipe, tokenizer=mixtral(), template=None, runner=None)

    class Encoder:
        __init__ = __exit__ = lambda *_: None
        __enter__ = lambda self: self  # noqa: E731
        encode_prompt = lambda self, text: loaded.tokenizer.encode(text)  # noqa: E731
        stops = lambda self: frozenset()  # noqa: E731

    monkeypatch.setattr("phalanx.cli.generate.ChatEncoder", Encoder)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    monkeypatch.setattr("phalanx.train.load_model", lambda *_, **__: loaded)
    monkeypatch.setattr("phalanx.train.generate", lambda *_, **__: iter([QUICK]))
    assert [*continuation(GenerateArgs(run=Path("x"), prompt="the", chat=chat))][-1] == text
    if not chat:
        assert RunHandle(Path("x")).generate("the") == "the quick"


def test_the_sample_of_a_run_has_its_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        prepared = SimpleNamespace(tokenizer=mixtral())
        validation = SimpleNamespace(microbatches=lambda n: [None])
        recipe = SimpleNamespace(train=SimpleNamespace(seq_len=8, seed=0))
        rank, step, parts = SimpleNamespace(recipe=recipe, sinks=lambda event: None), 5, SimpleNamespace(runner=None)

    monkeypatch.setattr("phalanx.train.loop.beginning", lambda *_: ([1, THE], {2}))
    monkeypatch.setattr("phalanx.train.loop.generate", lambda *_, **__: iter([QUICK, 2, FOX]))
    sampled = Trainer._sample(Run())  # type: ignore[arg-type]
    assert (sampled.step, sampled.prompt, sampled.text) == (5, "the", " quick")
