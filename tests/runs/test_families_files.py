"""Checkpoints in and out: bitwise through any mapping, slices only, loaded by transformers, and every way a folder can be broken."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_help import run_state
from hf_help import CONFIGS, hf_model, parts_of
from memory_help import Watch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from train_help import phalanx, write_text

from phalanx.cli.generate import GenerateArgs, continuation
from phalanx.core.errors import CheckpointError, ConfigError, DataError, RunError
from phalanx.core.files import new_folder
from phalanx.data import CHATML_TEMPLATE, ChatEncoder, prepare
from phalanx.data.tokenizer import CHATML_TOKENS, ByteTokenizer, beginnings, train_bpe
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.runtime.checkpoint import planner
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.groups import GroupCache
from phalanx.runtime.comm.peers import own_group
from phalanx.runtime.processes.launch import StopRequest
from phalanx.runtime.processes.world import WorldInfo
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.huggingface import export_hf
from phalanx.train.huggingface.hf_tokenizer import byte_tokenizer_json
from phalanx.train.huggingface.hugging_face import INDEX_FILE, MOST_OPEN, BoxReader, HfCheckpoint, open_checkpoint
from phalanx.train.huggingface.import_hf import import_rank, plan_import, share_of
from phalanx.train.setup import RunFolder
from ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra `hf`)"
    ),
]
MAPPINGS = (
    make_folding(world=1),
    make_folding(world=2, tp=2),
    make_folding(world=4, tp=2, ep=2),
    make_folding(world=2, pp=2),
)
VOCAB = 320


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family as transformers writes it, in several shards, with a byte tokenizer."""
    out = {}
    for name in CONFIGS:
        out[name] = folder = tmp_path_factory.mktemp("hf") / name
        hf_model(name, torch.float32, vocab_size=VOCAB).save_pretrained(folder, max_shard_size="60KB")
        assert (folder / INDEX_FILE).is_file()
        (folder / "tokenizer.json").write_text(byte_tokenizer_json())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
        )
    return out


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def imported(folder: Path, base: Path, *more: str, ranks: int = 1) -> Path:
    """The run that `phalanx import-hf` makes (in this process where one rank does it)."""
    overrides = ["--run.folder", str(base / "runs"), *more]
    if ranks > 1:
        done = phalanx("import-hf", str(folder), *overrides, "--launch.ranks", str(ranks))
        assert done.returncode == 0, done.stderr
    else:
        import_rank(plan_import(open_checkpoint(folder), overrides), WorldInfo(), StopRequest())
    return base / "runs" / folder.name


def exported(run: Path, target: Path, **more: Any) -> dict[str, torch.Tensor]:
    plan = export_hf.plan_export(run, target, **more)
    with new_folder(plan.target, writer="export"):
        export_hf.write_shards(plan)
        export_hf.finish_export(plan)
    return tensors_of(target)


# ---- there and back --------------------------------------------------------------------------------------------------------------


def through_mapping(
    rank: int, cache: GroupCache, folder: Path, checkpoints: Path, folding: Folding
) -> tuple[int, int, int]:
    """Read into the state of a mapping and save it from there; (bytes read, elements held, bytes of all)."""
    checkpoint = open_checkpoint(folder)
    parts = parts_of(rank, cache, checkpoint, folding, torch.float32)
    boxes = parts.state.boxes()
    with BoxReader(checkpoint) as reader:
        reader.fill(boxes)
    manager = CheckpointManager(checkpoints, group=own_group(folding.world, timeout_s=30), asynchronous=False)
    state = manager.read_state(0, model=json.loads(checkpoint.spec.to_json()) | _training(checkpoints))
    for name in ("created", "files"):
        state = type(state)(**{**vars(state), name: "" if name == "created" else {}})
    manager.save(boxes, state)
    manager.finish()
    held = sum(b.box.num_elements for b in boxes if b.name.startswith(("master/", "buffer/")))
    return reader.bytes_read, held, checkpoint.num_bytes


def _training(checkpoints: Path) -> dict[str, Any]:
    """The model of the run, whose router losses are the recipe's."""
    return dict(json.loads((checkpoints / "step-00000000" / "run_state.json").read_text())["model"])


@pytest.mark.core
@pytest.mark.parametrize("name", CONFIGS)
def test_import_export_import_is_bitwise_under_mappings(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    want = tensors_of(folders[name])
    run = imported(folders[name], tmp_path)
    assert same(exported(run, tmp_path / "first"), want)
    for folding in MAPPINGS:
        told = run_ranks(folding.world, through_mapping, folders[name], run / "checkpoints", folding)
        for read, held, total in told:
            assert read == 4 * held  # what it holds and nothing else; all tensors are fp32
            assert total == sum(t.nbytes for t in want.values())
        out = tmp_path / folding.label().replace("|", "-")
        assert same(exported(run, out, shard_bytes=50_000), want)
        assert len(list(out.glob("*.safetensors"))) > 2
        again = imported(out, tmp_path / f"again-{out.name}")
        assert same(exported(again, tmp_path / f"end-{out.name}"), want)


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "dtype", "wide"),
    [("mixtral", "bfloat16", "float32"), ("deepseek_v3", "float32", "float32"), ("olmoe", "float64", "float64")],
)
def test_an_import_takes_memory_for_one_part_and_writes_the_same_bytes(
    name: str, dtype: str, wide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as for masters and moments was taken before: they are made here, filled and saved at once, and every file is the same."""
    part, sizes = 1 << 18, {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128}
    monkeypatch.setattr(planner, "PART_BYTES", part)
    folder = tmp_path / name
    hf_model(name, getattr(torch, dtype), vocab_size=VOCAB, **sizes).save_pretrained(folder, max_shard_size="1MB")
    with Watch() as watch:
        run = imported(folder, tmp_path, "--data.tokenizer", "byte", "--train.dtype", dtype)
    checkpoint = open_checkpoint(folder)
    boxes = share_of(checkpoint.spec, rank=0, world=1, dtype=getattr(torch, wide))
    held = [dataclasses.replace(box, tensor=torch.empty_like(box.tensor, device="cpu")) for box in boxes]
    mapped = MOST_OPEN * max(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert watch.peak < mapped + 3 * part < sum(box.tensor.nbytes for box in held) / 4
    with BoxReader(checkpoint) as reader:
        reader.fill(held)
    found = CheckpointManager(run / "checkpoints")
    state = found.folder.read_state(0)
    plain = CheckpointManager(tmp_path / "plain", asynchronous=False)
    plain.save(held, state)
    assert plain.finish() is not None
    files = plain.folder.read_state(0).files
    assert files.keys() == state.files.keys() and files["__0_0.distcp"] == state.files["__0_0.distcp"]
    found.load(boxes := [dataclasses.replace(b, tensor=torch.full_like(b.tensor, torch.nan)) for b in held], step=0)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(boxes, held, strict=True))
    assert all(not b.tensor.any() for b in boxes if b.name.startswith("exp_avg"))
    assert found.largest_box(0, {b.name for b in boxes}) <= part


def with_a_lost_shard(rank: int, cache: GroupCache, folders: list[Path], path: Path) -> tuple[str, bool, list[int]]:
    """Rank 1 reads a folder of which a shard has gone since it was looked at."""
    checkpoint = open_checkpoint(folders[rank])
    if rank == 1:
        sorted(folders[1].glob("*.safetensors"))[1].unlink()
    manager = CheckpointManager(path, group=own_group(2, timeout_s=60), asynchronous=False)
    manager.open()
    boxes = share_of(checkpoint.spec, rank=rank, world=2, dtype=torch.float32)
    with BoxReader(checkpoint) as reader, pytest.raises(CheckpointError) as info:
        manager.save(boxes, run_state(0), fill=reader.fill)
        manager.finish()
    return str(info.value), manager.folder.writing(0).exists(), manager.folder.steps()


def test_what_cannot_be_read_is_named_to_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["mixtral"], tmp_path / "second")
    told = run_ranks(2, with_a_lost_shard, [folders["mixtral"], tmp_path / "second"], tmp_path / "checkpoints")
    assert told[0] == told[1] and told[0][1:] == (False, [])
    lost = f"{tmp_path / 'second'}/model-00002-of-"
    assert re.search(rf"{lost}\S+: model\.\S+ cannot be read: No such file.*; download it again", told[0][0]), told[0][
        0
    ]


def test_each_rank_reads_its_share(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folders["deepseek_v3"])
    read = []
    for rank in range(8):
        boxes = share_of(checkpoint.spec, rank=rank, world=8, dtype=torch.float32)
        with BoxReader(checkpoint) as reader:
            reader.fill(boxes)
        read.append(reader.bytes_read)
    assert sum(read) == checkpoint.num_bytes
    assert max(read) < 1.01 * checkpoint.num_bytes / 8
    run = imported(folders["deepseek_v3"], tmp_path, ranks=4)
    assert same(exported(run, tmp_path / "out"), tensors_of(folders["deepseek_v3"]))


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_the_export(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = imported(folders[name], tmp_path)
    exported(run, tmp_path / "out", shard_bytes=60_000)
    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loaded[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    want = AutoModelForCausalLM.from_pretrained(folders[name])
    assert model.config.to_dict() | {"_name_or_path": ""} == _no_ahead(want.config.to_dict()) | {"_name_or_path": ""}
    assert same(model.state_dict(), want.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "déjà vu\n\t<x> 1+1"
    assert tokenizer(text).input_ids == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(tokenizer(text).input_ids) == text and tokenizer.eos_token_id == 256


def _no_ahead(config: dict[str, Any]) -> dict[str, Any]:
    """Layers for prediction further ahead are left out."""
    return {k: 0 if k in ("num_mtp_layers", "num_nextn_predict_layers") else v for k, v in config.items()}


def test_the_fused_layout_is_read_too(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("mixtral", "deepseek_v3"):
        folder = tmp_path / name
        model = hf_model(name, torch.float32, vocab_size=VOCAB)
        model.save_pretrained(folder, save_original_format=False)
        assert any(n.endswith("experts.gate_up_proj") for n in tensors_of(folder))
        run = imported(folder, tmp_path, "--data.tokenizer", "byte")
        assert same(exported(run, tmp_path / f"{name}-out"), tensors_of(folders[name]))


def test_bfloat16_comes_back_as_it_was(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    hf_model("deepseek_v3", torch.bfloat16, vocab_size=VOCAB).save_pretrained(folder)
    tensors = tensors_of(folder)
    biases = {n: t.float() for n, t in tensors.items() if n.endswith("correction_bias")}
    save_file({**tensors, **biases}, folder / "model.safetensors", metadata={"format": "pt"})  # as they are published
    run = imported(folder, tmp_path, "--data.tokenizer", "byte")
    assert same(exported(run, tmp_path / "out"), tensors_of(folder))
    wide = exported(run, tmp_path / "wide", dtype="float32")
    assert all(t.dtype == torch.float32 and torch.equal(t, tensors[n].float()) for n, t in wide.items())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


def test_float16_and_mixed_types_come_back_as_they_were(tmp_path: Path) -> None:
    """Whatever config.json says of them: each tensor in the type it came in, also where all experts came in one."""
    folder = tmp_path / "half"
    model = hf_model("qwen3_moe", torch.float16, vocab_size=VOCAB)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    run = imported(folder, tmp_path, "--data.tokenizer", "byte")
    assert same(exported(run, tmp_path / "out"), tensors_of(folder))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    narrow = exported(run, tmp_path / "narrow", dtype="bfloat16")
    assert all(t.dtype == torch.bfloat16 for t in narrow.values())
    mixed = tmp_path / "mixed"
    shutil.copytree(folder, mixed)
    wide = {n: t.float() if "gate.weight" in n or "norm" in n else t for n, t in tensors_of(folder).items()}
    save_file(wide, mixed / "model.safetensors", metadata={"format": "pt"})
    _edit_config(mixed, dtype="bfloat16")
    assert same(exported(imported(mixed, tmp_path, "--data.tokenizer", "byte"), tmp_path / "out-mixed"), wide)
    fused = tmp_path / "fused"
    model.save_pretrained(fused, save_original_format=False)
    assert same(
        exported(imported(fused, tmp_path, "--data.tokenizer", "byte"), tmp_path / "out-fused"), tensors_of(folder)
    )


def test_a_number_too_large_for_float16_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(folders["mixtral"], folder)
    _edit_tensor(folder, "model.norm.weight", lambda t: t * 1e5)
    run = imported(folder, tmp_path)
    with pytest.raises(RunError, match=r"model\.norm\.weight has .*, too large for float16; use --dtype bfloat16"):
        exported(run, tmp_path / "out", dtype="float16")


def test_a_run_of_an_older_version_goes_out_as_what_it_is(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its config.json says no theta, which transformers reads otherwise than the version that imported it."""
    folder = tmp_path / "mixtral"
    shutil.copytree(folders["mixtral"], folder)
    _edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    run = imported(folder, tmp_path)
    config = run / "hugging_face" / "config.json"
    body = json.loads(config.read_text())
    del body["rope_parameters"]
    config.write_text(json.dumps(body))
    (run / "hugging_face" / "phalanx_types.json").unlink()
    exported(run, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after["rope_parameters"]["rope_theta"] == 1e4 and after["max_position_embeddings"] == 64
    assert not (tmp_path / "out" / "phalanx_types.json").exists()


def test_a_caution_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "olmoe"
    hf_model("olmoe, renormalised", torch.float32, vocab_size=VOCAB).save_pretrained(folder)
    run = imported(folder, tmp_path, "--data.tokenizer", "byte")
    done = phalanx("export-hf", str(run), str(tmp_path / "out"))
    assert done.returncode == 0 and "warning: norm_topk_prob is true" in done.stderr and "vLLM" in done.stderr


# ---- whole commands --------------------------------------------------------------------------------------------------------------


def test_an_imported_run_generates_trains_and_goes_out(folders: dict[str, Path], tmp_path: Path) -> None:
    write_text(tmp_path / "text", files=4)
    settings = [
        "--run.name", "mine", "--run.folder", str(tmp_path / "runs"), "--data.sources", f'["{tmp_path / "text"}"]',
        "--data.cache", str(tmp_path / "cache"), "--train.seq_len", "32", "--train.global_batch", "8",
        "--train.micro_batch", "2", "--train.steps", "2", "--train.dtype", "float32", "--train.eval_interval", "0",
        "--train.eval_batches", "1", "--observe.console", "none", "--launch.ranks", "2",
    ]  # fmt: skip
    done = phalanx("import-hf", str(folders["deepseek_v3"]), *settings)
    run = tmp_path / "runs" / "mine"
    assert done.returncode == 0 and f"{run} is a run at step 0" in done.stdout and "50.0%" in done.stdout, done.stderr
    assert phalanx("generate", str(run), "x = ", "--tokens", "4").returncode == 0
    trained = phalanx("train", str(run / "recipe.toml"), "--trust")
    assert trained.returncode == 0, trained.stderr
    done = phalanx("export-hf", str(run), str(tmp_path / "out"), "--shard-mb", "1", "--ranks", "2")
    assert done.returncode == 0 and "DeepseekV3ForCausalLM, step 2" in done.stdout, done.stderr
    before, after = tensors_of(folders["deepseek_v3"]), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() and not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    moved = [n for n in before if n.endswith("correction_bias") and not torch.equal(before[n], after[n])]
    assert len(moved) == 2  # the expert biases were trained too
    again = phalanx("import-hf", str(folders["deepseek_v3"]), *settings)
    assert again.returncode == 2 and "holds checkpoints of steps" in again.stderr


def test_a_model_that_talks_otherwise_than_it_came_goes_out_with_its_new_template(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "olmoe").mkdir()
    for path in folders["olmoe"].iterdir():
        (tmp_path / "olmoe" / path.name).write_bytes(path.read_bytes())
    tokenizer = train_bpe(["a b"], vocab_size=64, control_tokens=CHATML_TOKENS)
    (tmp_path / "olmoe" / "tokenizer.json").write_text(tokenizer)
    came = {"tokenizer_config.json": '{"chat_template": "x", "bos_token": "b"}', "chat_template.jinja": "y"}
    (tmp_path / "olmoe" / "generation_config.json").write_text('{"eos_token_id": 7}')
    for name, content in came.items():
        (tmp_path / "olmoe" / name).write_text(content)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    own = str(tmp_path / "own.jinja")
    for choice, want in (("model", came), ("chatml", {"tokenizer_config.json": CHATML_TEMPLATE}), (own, {"tokenizer_config.json": Path(own).read_text()})):  # fmt: skip
        run = imported(
            tmp_path / "olmoe", tmp_path / f"run-{Path(choice).stem}", "--data.sources", "a.jsonl", "--data.chat_template", choice
        )  # fmt: skip
        if choice == own:
            Path(own).unlink()  # the run has kept it
        choice = Path(choice).stem
        exported(run, tmp_path / f"{choice}-out")
        found = {
            n: (tmp_path / f"{choice}-out" / n).read_text() for n in came if (tmp_path / f"{choice}-out" / n).exists()
        }
        ends = json.loads((tmp_path / f"{choice}-out" / "generation_config.json").read_text())["eos_token_id"]
        if choice == "model":
            assert ends == 7  # as it came
        else:
            assert ends == [7, 2]  # and what ends an answer
            told = json.loads(found["tokenizer_config.json"])
            assert told["bos_token"] == "b"
            found["tokenizer_config.json"] = told["chat_template"]
        assert found == want


def test_a_model_with_another_tokenizer_than_it_came_with_goes_out_with_that(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its own tokens, in place of all files of the one that came; how it generates and talks stays."""
    from transformers import AutoTokenizer

    folder, mine = tmp_path / "olmoe", tmp_path / "mine"
    shutil.copytree(folders["olmoe"], folder)
    mine.mkdir()
    (mine / "tokenizer.json").write_text(train_bpe(["a b"], vocab_size=64, control_tokens=("<|im_start|>", "<s>")))
    end, begin = (Tokenizer.from_file(str(mine / "tokenizer.json")).token_to_id(t) for t in ("<|endoftext|>", "<s>"))
    came = {
        "special_tokens_map.json": {"eos_token": "</s>"},
        "tokenizer_config.json": {"bos_token": {"content": "<s>"}, "unk_token": "<unk>", "chat_template": "x", "model_max_length": 64},
        "generation_config.json": {"eos_token_id": [300, begin], "temperature": 0.5},
    }  # fmt: skip
    for name, table in came.items():
        (folder / name).write_text(json.dumps(table))
    for given in (folder, tmp_path / "bare" / "olmoe"):  # the second has no tokenizer.json, as those of tiktoken
        if given != folder:
            shutil.copytree(folder, given)
            (given / "tokenizer.json").unlink()
        run = imported(given, given.parent, "--data.tokenizer", str(mine / "tokenizer.json"))
        exported(run, out := given.parent / "out")
        found = {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}
        assert "special_tokens_map.json" not in found and found["config.json"]["eos_token_id"] == end
        assert found["generation_config.json"] == {"eos_token_id": [end, begin], "temperature": 0.5}
        told = found["tokenizer_config.json"]
        assert (told["eos_token"], told["bos_token"], told.get("unk_token")) == (
            "<|endoftext|>",
            "<s>",
            None,
        )
        assert (told["chat_template"], told["model_max_length"]) == ("x", 64)
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert tokenizer("<s>").input_ids == [begin] and tokenizer.eos_token_id == end


@pytest.mark.parametrize("came", [{"eos_token_id": 7, "top_k": 5}, None])
def test_an_end_that_the_recipe_names_ends_the_export_too(
    came: dict[str, Any] | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "olmoe"
    shutil.copytree(folders["olmoe"], folder)
    (folder / "tokenizer.json").write_text(train_bpe(["a b"], vocab_size=64, control_tokens=("<|im_end|>",)))
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if came is not None:
        (folder / "generation_config.json").write_text(json.dumps(came))
    run = imported(folder, tmp_path, "--data.eos_token", "<|im_end|>")
    exported(run, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    wanted = came or {"eos_token_id": 0}  # by config.json
    assert found == wanted | {"eos_token_id": [wanted["eos_token_id"], end]}


def test_texts_begin_as_transformers_begins_them(folders: dict[str, Path], tmp_path: Path) -> None:
    """With the token before texts that came with the model, in its text, its prompts and its export."""
    from transformers import AutoTokenizer

    folder = tmp_path / "olmoe"
    shutil.copytree(folders["olmoe"], folder)
    words = Tokenizer.from_str(train_bpe(["a b"], vocab_size=64, control_tokens=("<s>",)))
    begin = words.token_to_id("<s>")
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    words.save(str(folder / "tokenizer.json"))
    run = imported(folder, tmp_path, "--data.sources", str(tmp_path / "texts"))
    (tmp_path / "texts").mkdir()
    for number in range(2):
        (tmp_path / "texts" / f"{number}.txt").write_text("a b\n" * (number + 1))
    recipe, theirs = RunFolder(run).read_recipe(), AutoTokenizer.from_pretrained(folder)
    assert recipe.data.bos_token == "<s>"
    prepared = prepare(dataclasses.replace(recipe.data, cache=str(tmp_path / "cache")))
    (stream,) = (s for pool in prepared.train.pools for s in pool)
    text = prepared.tokenizer.decode(stream.document(0).tolist())
    assert stream.document(0).tolist() == [*theirs(text).input_ids, prepared.tokenizer.eos_id]
    prompts: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.train.generate", lambda runner, prompt, **_: prompts.append(list(prompt)) or iter(()))
        assert list(continuation(GenerateArgs(run=run, prompt="b a"))) == [""]
    assert prompts == [theirs("b a").input_ids] and prompts[0][0] == begin
    exported(run, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("b a").input_ids == prompts[0]


def with_tokenizer(folder: Path, template: str, config: dict[str, Any] | None = None) -> Path:
    """A tokenizer of ours beside the model in `folder`, that puts `template` (BOS, $A, EOS; `bytes`: a step that adds nothing) around texts."""
    folder.mkdir(parents=True, exist_ok=True)
    words = Tokenizer.from_str(train_bpe(["a b user: assistant: "], vocab_size=300, control_tokens=("<s>", "</s>")))
    tokens = [(token, words.token_to_id(token)) for token in ("<s>", "</s>")]
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] * ("bytes" in template)
    if around := template.replace("bytes", "").strip():
        steps.append(processors.TemplateProcessing(single=around, special_tokens=tokens))
    if steps:
        words.post_processor = steps[0] if len(steps) == 1 else processors.Sequence(steps)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **(config or {})}))
    return folder / "tokenizer.json"


FLAGGED = {"bos_token": "<s>", "add_bos_token": True, "tokenizer_class": "LlamaTokenizerFast"}
NEOX = {"bos_token": "<s>", "tokenizer_class": "GPTNeoXTokenizerFast", "add_eos_token": True, "add_bos_token": True}


@pytest.mark.parametrize(
    ("template", "config", "asked", "begin", "same"),
    [
        ("<s> $A", FLAGGED, None, "<s>", True),
        ("<s> $A", {}, None, "<s>", False),  # its class would be GPTNeoX's, which goes its own way
        ("<s> $A", {"tokenizer_class": "PreTrainedTokenizerFast"}, None, "<s>", True),
        ("bytes", {}, None, "", True),
        ("bytes", FLAGGED, None, "<s>", False),
        ("", NEOX, None, "<s>", False),
        ("bytes <s> $A", FLAGGED | {"add_bos_token": False}, None, "", False),
        ("<s> $A </s>", FLAGGED, None, "<s>", False),
        ("", {}, "<s>", "<s>", False),
        ("<s> $A", FLAGGED, "none", "", False),
    ],
)
def test_exports_begin_and_end_texts_as_the_run_did(
    template: str, config: dict[str, Any], asked: str | None, begin: str, same: bool, folders: dict[str, Path], tmp_path: Path
) -> None:  # fmt: skip
    """With the tokenizer that came, whose files are as they came where they say the same; or with one that did not."""
    from transformers import AutoTokenizer

    folder = tmp_path / "olmoe"
    shutil.copytree(folders["olmoe"], folder)
    more = ["--data.bos_token", asked] if asked else []
    for given in (folder, tmp_path / "other" / "olmoe"):
        if given == folder:
            own = with_tokenizer(folder, template, config)
            (folder / "special_tokens_map.json").write_text('{"unk_token": "</s>"}')
            (folder / "generation_config.json").write_text('{"bos_token_id": 77, "eos_token_id": 1}')
            run = imported(given, given.parent, *more)
        else:
            shutil.copytree(folders["olmoe"], given)
            told = ["--data.tokenizer", str(own), "--data.bos_token", begin or "none"]
            run = imported(given, given.parent, *told)
        tokenizer = RunFolder(run).read_tokenizer()
        assert tokenizer.bos_token == begin
        exported(run, out := given.parent / "out")
        ids = [tokenizer.bos_id] * bool(begin) + tokenizer.encode("b a").tolist()
        theirs = AutoTokenizer.from_pretrained(out)
        assert theirs("b a").input_ids == ids and theirs.eos_token == "</s>"
        files = {path.name: path.read_bytes() for path in out.glob("*.json")}
        if given == folder and same:
            names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
            assert all(files[name] == (folder / name).read_bytes() for name in names)
        else:
            assert json.loads(files["config.json"])["bos_token_id"] == tokenizer.bos_id
            assert json.loads(files["generation_config.json"]).get("bos_token_id") == tokenizer.bos_id
        if "bytes" in template:
            assert "trim_offsets\":false" in json.dumps(json.loads(files["tokenizer.json"])["post_processor"], separators=(",", ":"))  # fmt: skip
        again = beginnings(out / "tokenizer.json")
        assert (again.template, again.taken) == (begin, begin)


def test_a_config_that_is_made_names_what_texts_begin_with(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["mixtral"], tmp_path / "mixtral")
    with_tokenizer(tmp_path / "mixtral", "<s> $A")
    run = imported(tmp_path / "mixtral", tmp_path)
    (run / "hugging_face" / "config.json").write_text("{}")
    exported(run, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["bos_token_id"] == RunFolder(run).read_tokenizer().bos_id is not None


def test_an_import_says_where_files_disagree_about_what_begins_texts(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders["olmoe"], tmp_path / "olmoe")
    for number, (template, config, more, said) in enumerate([
        ("", FLAGGED, [], "with '<s>' by add_bos_token in tokenizer_config.json, with no token by tokenizer.json"),
        ("<s> $A", {"add_bos_token": False}, [], "with no token by add_bos_token in tokenizer_config.json, with '<s>' by"),
        ("", FLAGGED, ["--data.bos_token", "none"], ""),
        ("<s> $A", FLAGGED, [], ""),
    ]):  # fmt: skip
        with_tokenizer(tmp_path / "olmoe", template, config)
        imported(tmp_path / "olmoe", tmp_path / str(number), *more)
        told = [line for line in capsys.readouterr().out.splitlines() if "add_bos_token" in line]
        assert len(told) == bool(said) and said in "".join(told)
        assert all("--data.bos_token TOKEN (or none) decides otherwise" in line for line in told)


TALKS = "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}{{ sep_token }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"  # fmt: skip


@pytest.mark.parametrize("own", ["jinja", "default", "text", "other file", "other tokenizer"])
@pytest.mark.parametrize("begin", ["<s>", "none"])
def test_exports_write_conversations_with_the_tokens_of_the_run(
    own: str, begin: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Here its files name them where transformers reads none, or not at all."""
    from transformers import AutoTokenizer

    folder = tmp_path / "olmoe"
    shutil.copytree(folders["olmoe"], folder)
    listed = [{"name": "tools", "template": "x"}, {"name": "default", "template": TALKS}]
    kept = {"default": {"chat_template": listed}, "text": {"chat_template": TALKS}}.get(own, {})
    decoder = {"1": {"content": "<s>", "special": True}}
    config = {"bos_token": None, "added_tokens_decoder": decoder, "tokenizer_class": "PreTrainedTokenizerFast", **kept}
    given = with_tokenizer(tmp_path / "mine" if own == "other tokenizer" else folder, "", config)
    (given.parent / "special_tokens_map.json").write_text('{"sep_token": "<s>", "eos_token": "x"}')
    written = given.parent / ("mine.jinja" if own == "other file" else "chat_template.jinja")
    if not kept:
        written.write_text(TALKS)
    more = ["--data.tokenizer", str(given)] if own == "other tokenizer" else []
    choice = str(written) if own == "other file" else "model"
    run = imported(folder, tmp_path, "--data.sources", "a.jsonl", "--data.chat_template", choice, "--data.bos_token", begin, *more)  # fmt: skip
    exported(run, tmp_path / "out")
    found = RunFolder(run)
    with ChatEncoder(tokenizer := found.read_tokenizer(), found.read_template(found.read_recipe())) as encoder:
        ours = encoder.encode_prompt("b a").tolist()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "b a"}]
    assert theirs.apply_chat_template(asked, add_generation_prompt=True).input_ids == ours
    assert (ours[0] == tokenizer.bos_id) == (begin == "<s>") and ours.count(1) >= 1
    assert own != "default" or "tools" in theirs.chat_template


def test_a_config_that_names_code_goes_out_without_it(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoConfig

    shutil.copytree(folders["deepseek_v3"], tmp_path / "v3")
    _edit_config(tmp_path / "v3", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    exported(imported(tmp_path / "v3", tmp_path), tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True).model_type == "deepseek_v3"


def test_a_run_trained_here_goes_out(tmp_path: Path) -> None:
    """From a preset, with the byte tokenizer: config and tokenizer are made, and transformers computes the same next token."""
    from train_help import train_args
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from phalanx.train.generation import load_model, next_logits

    write_text(tmp_path / "text", files=4)
    done = phalanx("train", *train_args(tmp_path, train__steps=2, launch__ranks=1, checkpoint__interval=0))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    exported(run, tmp_path / "out")
    model, tokenizer = (c.from_pretrained(tmp_path / "out") for c in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("import os\n").input_ids
    loaded = load_model(run)
    theirs = model(torch.tensor([ids])).logits[0, -1].float()
    assert torch.allclose(theirs, next_logits(loaded.runner, ids), atol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["dtype"]) == ("mixtral", 256, "float32")
    with pytest.raises(ConfigError, match=r"--family|olmoe: |model\.\w+"):
        export_hf.plan_export(run, tmp_path / "other", family="olmoe")
    with pytest.raises(ConfigError, match="is a folder that is not empty"):
        export_hf.plan_export(run, tmp_path / "out", dtype="float32")
    with pytest.raises(ConfigError, match="--dtype = 'float23': is not a known data type"):
        export_hf.plan_export(run, tmp_path / "new", dtype="float23")
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        export_hf.plan_export(run, tmp_path / "new", step=7)
    with pytest.raises(ConfigError, match="is the folder that this command runs in"):
        export_hf.plan_export(run, Path("."))
    plan = export_hf.plan_export(run, next((tmp_path / "text").iterdir()) / "out")
    with (
        pytest.raises(RunError, match=r"cannot write .*out: .*has been removed"),
        new_folder(plan.target, writer="export"),
    ):
        pass
    plan = export_hf.plan_export(run, tmp_path / "new")
    with pytest.raises(RunError, match=r"cannot write .*new: "), new_folder(plan.target, writer="export"):
        plan.writing.rmdir()  # the folder to write into was taken away
        export_hf.write_shards(plan)
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".writing-*"))
    with new_folder(plan.target, writer="export"), pytest.raises(RunError, match="another export writes there"):
        exported(run, plan.target)


# ---- broken folders ----------------------------------------------------------------------------------------------------------------


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    body = json.loads((folder / INDEX_FILE).read_text())
    edit(body["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(body))


def _edit_config(folder: Path, **changes: Any) -> None:
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**body, **changes}))


def _edit_tensor(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    body = json.loads((folder / INDEX_FILE).read_text())
    path = folder / body["weight_map"][name]
    tensors = load_file(path)
    changed = edit(tensors.pop(name))
    save_file(tensors | ({} if changed is None else {name: changed}), path, metadata={"format": "pt"})


ROUTER = "model.layers.1.block_sparse_moe.gate.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json", "must be there"]),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), ["must be JSON"]),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ["must be a JSON table"]),
    "unknown architecture": (
        lambda f: _edit_config(f, model_type="mixtrall"),
        ["'mixtrall': is not an architecture", "those are deepseek_v2, deepseek_v3, mixtral"],
    ),
    "missing shard": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        ["model-00002-of-", "the shard is missing", "there are model-00001"],
    ),
    "cut shard": (
        lambda f: (p := sorted(f.glob("*.safetensors"))[0]).write_bytes(p.read_bytes()[:-100]),
        ["model-00001-of-", "is not a complete safetensors file"],
    ),
    "pointer of Git LFS": (
        lambda f: sorted(f.glob("*.safetensors"))[0].write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n"),
        ["model-00001-of-", "is a pointer of Git LFS", "git lfs pull"],
    ),
    "broken index": (lambda f: (f / INDEX_FILE).write_text("{}"), [INDEX_FILE, "must be an index"]),
    "index leads out": (
        lambda f: _edit_index(f, lambda m: m.update({ROUTER: "../x.safetensors"})),
        ["must name files of this folder"],
    ),
    "tensor not in its shard": (
        lambda f: _edit_tensor(f, ROUTER, lambda t: None),
        [f"{ROUTER} = ", "is not in the shard that the index names"],
    ),
    "missing tensor": (lambda f: _edit_index(f, lambda m: m.pop(ROUTER)), [f"{ROUTER} = (4, 32): is missing"]),
    "wrong shape": (
        lambda f: _edit_tensor(f, ROUTER, lambda t: t[:, :-1].contiguous()),
        [f"{ROUTER} = (4, 31): must have the shape (4, 32), by config.json"],
    ),
    "wrong type": (lambda f: _edit_tensor(f, ROUTER, lambda t: t.to(torch.int8)), [f"{ROUTER} = 'I8'", "BF16"]),
    "shape by config": (
        lambda f: _edit_config(f, hidden_size=64),
        ["model.norm.weight = (32,): must have the shape (64,)"],
    ),
    "pickled weights": (
        lambda f: [p.unlink() for p in f.glob("*.safetensors*")] + [(f / "pytorch_model.bin").write_bytes(b"")],
        ["model.safetensors", "pickled weights are not read"],
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_refused_by_name(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(folders["mixtral"], folder)
    damage, words = BROKEN[kind]
    damage(folder)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert all(word in str(error.value) for word in [*words, str(folder)]), str(error.value)


def test_links_out_of_a_folder_are_refused_but_for_those_of_a_cache(folders: dict[str, Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"token": "his"}')
    folder = tmp_path / "mixtral"
    shutil.copytree(folders["mixtral"], folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"generation_config\.json = .*secret': is a link to a file outside"):
        open_checkpoint(folder)
    cache = tmp_path / "models--a--b"
    shutil.copytree(folders["mixtral"], cache / "snapshots" / "123")
    (cache / "blobs").mkdir()
    for path in list((cache / "snapshots" / "123").iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(Path("..", "..", "blobs", path.name))
    assert open_checkpoint(cache / "snapshots" / "123").tensors


def test_a_folder_that_is_not_there_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "nowhere")
    (problem,) = error.value.problems
    assert problem.rule == "is not a folder" and "config.json" in problem.hint


def test_all_problems_of_a_folder_come_at_once(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(folders["mixtral"], folder)
    _edit_tensor(folder, ROUTER, lambda t: t[:2].contiguous())
    _edit_tensor(folder, "model.norm.weight", lambda t: t.to(torch.int32))
    shard = next(iter(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()))
    extra = {**load_file(folder / shard), "model.layers.0.self_attn.q_norm.weight": torch.zeros(8)}
    save_file(extra, folder / shard)
    _edit_index(
        folder, lambda m: (m.update({"model.layers.0.self_attn.q_norm.weight": shard}), m.pop("lm_head.weight"))
    )
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    text = str(error.value)
    assert len(error.value.problems) == 4 and "q_norm.weight" in text and "has no place in this model" in text
    done = phalanx("import-hf", str(folder), "--run.folder", str(tmp_path / "runs"))
    assert done.returncode == 2 and "4 problems with the Hugging Face checkpoint" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_what_a_person_may_not_choose(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folders["deepseek_v3"])
    with pytest.raises(ConfigError) as error:
        plan_import(checkpoint, ["--model.hidden", "64", "--router.num_groups", "2", "--train.steps", "5"])
    assert [p.where for p in error.value.problems] == ["--model.hidden", "--router.num_groups"]
    with pytest.raises(ConfigError, match=r"router\.bias_rate = 0.0: has no expert biases to receive those"):
        plan_import(checkpoint, ["--router.bias_rate", "0"])
    with pytest.raises(ConfigError, match="is not a setting"):
        plan_import(checkpoint, ["--train.stepps", "5"])
    (bare := tmp_path / "bare").mkdir()
    for path in folders["mixtral"].iterdir():
        if "tokenizer" not in path.name:
            shutil.copy(path, bare)
    with pytest.raises(ConfigError, match=r"data.tokenizer = 'bpe:8192'.*has no tokenizer.json"):
        plan_import(open_checkpoint(bare), [])
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"is not a Hugging Face tokenizer\.json"):
        plan_import(open_checkpoint(bare), [])
    done = phalanx("import-hf")
    assert done.returncode == 2 and "the first argument is the folder" in done.stderr


def test_float64_is_not_rounded_silently(tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    hf_model("olmoe", torch.float64, vocab_size=VOCAB).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"train\.dtype = 'bfloat16': would round"):
        plan_import(open_checkpoint(folder), ["--data.tokenizer", "byte"])
    run = imported(folder, tmp_path, "--data.tokenizer", "byte", "--train.dtype", "float64")
    assert same(exported(run, tmp_path / "out"), tensors_of(folder))


def test_tensors_for_further_tokens_are_left(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "deepseek_v3"
    shutil.copytree(folders["deepseek_v3"], folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    save_file(
        {**load_file(shard), "model.layers.3.eh_proj.weight": torch.zeros(32, 64)}, shard, metadata={"format": "pt"}
    )
    _edit_index(folder, lambda m: m.update({"model.layers.3.eh_proj.weight": shard.name}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.ignored == ("model.layers.3.eh_proj.weight",)
    assert _bytes_of(checkpoint) == checkpoint.num_bytes


def test_a_tensor_that_repeats_another_must_have_its_numbers(tmp_path: Path) -> None:
    """transformers takes a head that is there and differs as it is, whatever tie_word_embeddings says."""
    folder = tmp_path / "tied"
    hf_model("qwen3_moe", torch.float32, vocab_size=VOCAB).save_pretrained(folder)
    tensors = tensors_of(folder)
    for head in (tensors["model.embed_tokens.weight"].clone(), torch.ones(VOCAB, 32), torch.ones(VOCAB + 1, 32)):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        if torch.equal(head, tensors["model.embed_tokens.weight"]):
            assert open_checkpoint(folder).ignored == ("lm_head.weight",)
            continue
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: must have the numbers of model\.embed_tokens"):
            open_checkpoint(folder)


def test_many_tensors_of_a_type_that_is_not_read_are_counted(folders: dict[str, Path], tmp_path: Path) -> None:
    """DeepSeek-V3 as it is published, in FP8 with a scale for each block."""
    shutil.copytree(folders["deepseek_v3"], tmp_path / "v3")
    tensors = tensors_of(tmp_path / "v3")
    narrow = {n: t.to(torch.float8_e4m3fn) if "proj" in n else t for n, t in tensors.items()}
    scales = {f"{n}_scale_inv": torch.ones(1, 1) for n, t in narrow.items() if t.dtype != torch.float32}
    save_file({**narrow, **scales}, tmp_path / "v3" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "v3")
    told = [str(p) for p in error.value.problems]
    assert len(told) == 2 * 13 and told[0].endswith(
        "'F8_E4M3': must be one of BF16, F16, F32, F64; convert it to bfloat16 first"
    )
    assert f"... = '{len(scales) - 12} more tensors': must be one of" in told[12] and "has no place" in told[25]


def test_one_file_counts_more_than_an_old_index(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers leaves the index of what it saved before beside it, and reads the one file."""
    folder, shards = tmp_path / "mixtral", tensors_of(folders["mixtral"])
    shutil.copytree(folders["mixtral"], folder)
    changed = {**shards, "model.norm.weight": torch.full((32,), 3.0)}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    run = imported(folder, tmp_path)
    assert same(exported(run, tmp_path / "out"), changed)
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
    assert open_checkpoint(folder).tensors.keys() == shards.keys()


def test_tokens_without_rows_in_the_embedding_are_told(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        train_bpe(["a b"], vocab_size=64, control_tokens=[f"<{i}>" for i in range(VOCAB)])
    )
    with pytest.raises(
        ConfigError, match=rf"data\.tokenizer = .*has ids up to \d+, but by config.json vocab_size is {VOCAB}"
    ):
        plan_import(open_checkpoint(folders["olmoe"]), ["--data.tokenizer", str(tmp_path / "tokenizer.json")])


def _bytes_of(checkpoint: HfCheckpoint) -> int:
    total = 0
    for name in {link.tensor for link in checkpoint.links}:
        with safe_open(str(checkpoint.path / checkpoint.tensors[name].file), "pt") as shard:
            total += shard.get_tensor(name).nbytes
    return total


def test_a_box_that_is_nowhere_is_an_error(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["mixtral"])
    box = share_of(checkpoint.spec, rank=0, world=1, dtype=torch.float32)[0]
    lost = BoxTensor("master/nothing", box.shape, box.box, box.tensor, primary=True)
    with BoxReader(checkpoint) as reader, pytest.raises(CheckpointError, match="only 0 of"):
        reader.fill([lost])
