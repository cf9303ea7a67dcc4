"""Multi-token prediction: against its definition, and in and out of DeepSeek-V3's checkpoints."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_help import hf_model, in_float64, logical_gradients, parts_of, tokens_and_labels
from moe_help import context
from safetensors.torch import load_file, save_file

from phalanx.core.config import ModelConfig, RouterConfig
from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.core.files import new_folder
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.decoder import Decoder
from phalanx.models.mtp import tokens_ahead
from phalanx.models.shard import part_of
from phalanx.plan.layout.parameters import stage_params
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.stages import assign_stages, layer_costs
from phalanx.plan.model.model import RouterSpec, flops_per_token, parameters, resolve_model
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.train.assembly import assemble
from phalanx.train.huggingface.hugging_face import BoxReader, open_checkpoint
from phalanx.train.step import StepParts, train_step
from phalanx.train.step.loss import objective
from phalanx.verify.numbers import StartingValues, microbatch
from phalanx.verify.reference import GradientRecorder, context as context_of
from phalanx.verify.setups import SEQ_LEN, Setup, small_model
from ranks import run_ranks

pytestmark = pytest.mark.ranks
ROUTER = RouterSpec(score="sigmoid", renormalize=True, bias_rate=1e-3, aux_loss=0.1, z_loss=0.01)
GROUPED: dict[str, Any] = {"mtp_layers": 2, "router": ROUTER, "shared_ffn": 48}
SETUP = Setup(label="mtp", spec=small_model("mtp", **GROUPED), dispatch=DispatchSpec(), packed=True)


# ---- definition -----------------------------------------------------------------------------------------------------------------


def packed() -> TokenBatch:
    segments = ((3, 5), (8,))
    tokens = torch.arange(16).view(2, 8)
    labels = tokens + 1
    labels[0, 2] = labels[0, 7] = labels[1, 7] = IGNORE
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in segments])
    return TokenBatch(tokens, labels, positions, segments)


def test_tokens_ahead_stay_in_their_document() -> None:
    n = IGNORE
    tokens, labels = tokens_ahead(packed(), 1)
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 7], [9, 10, 11, 12, 13, 14, 15, 15]]
    assert labels.tolist() == [[2, n, n, 5, 6, 7, n, n], [10, 11, 12, 13, 14, 15, n, n]]
    _, labels = tokens_ahead(packed(), 2)
    assert labels.tolist() == [[n, n, n, 6, 7, n, n, n], [11, 12, 13, 14, 15, n, n, n]]


@pytest.mark.parametrize("further", [1, 2])
def test_parts_see_what_the_whole_sees(further: int) -> None:
    folding = make_folding(world=4, cp=2, tp=2)
    tokens, labels = tokens_ahead(packed(), further)
    for rank in range(4):
        part = part_of(packed(), folding, rank)
        got_tokens, got_labels = tokens_ahead(part, further)
        columns = part.tokens_BS[1] - 8
        assert torch.equal(got_tokens, tokens[:, columns]) and torch.equal(got_labels, labels[:, columns])


def model_and_batch(**changes: Any) -> tuple[Decoder, TokenBatch]:
    spec = dataclasses.replace(small_model("mtp", **GROUPED), **changes)
    return Decoder(context(spec)), microbatch(SETUP, 0)


def test_objective_is_the_definition() -> None:
    """Blocks run by hand on the final hidden states, each on the output of the one before."""
    model, batch = model_and_batch(router=RouterSpec())
    info, (stage,) = ForwardInfo(), model.stages
    seen: list[dict[str, Any]] = []
    for layer in model.spec.mtp_blocks:
        model.layers[str(layer)].register_forward_hook(
            lambda m, args, kwargs, out: seen.append(kwargs), with_kwargs=True
        )
    output = model(batch, info)
    total, share = objective(model, output, batch, info, stage=stage, valid_tokens=torch.tensor(10))
    x, losses = output.hidden_TH, []
    for d, layer in enumerate(model.spec.mtp_blocks):
        block = model.layers[str(layer)]
        tokens, labels = tokens_ahead(batch, d + 1)
        joined = torch.cat((block.token_norm(model.embedding.weight[tokens.flatten()]), block.hidden_norm(x)), dim=-1)
        out, delta, _ = block(joined @ block.join.weight.T, None, **seen[d])
        x = block.norm(out + delta)
        losses.append(F.cross_entropy(x @ model.head_weight.T, labels.flatten(), ignore_index=IGNORE, reduction="sum"))
    want = sum(losses) / 10 / 2
    assert torch.allclose(share.mtp_loss, want.detach(), rtol=1e-12)
    assert torch.allclose(total.detach(), (share.cross_entropy + 0.3 * want).detach(), rtol=1e-12)
    assert tokens_ahead(batch, 2)[1].ne(IGNORE).sum() > 0


def reported(rank: int, cache: GroupCache, folding: Folding) -> tuple[float, float]:
    ctx = context_of(SETUP, build_groups(folding, rank=rank, cache=cache), Collectives(), dtype=torch.float64)
    parts = assemble(ctx, optim=SETUP.optim, num_microbatches=1)
    StartingValues().fill(parts.state.boxes(), {p.name: p for p in parameters(SETUP.spec)})
    parts.state.restore(parts.comms)
    result = train_step(parts, [part_of(microbatch(SETUP, 0), folding, rank)], step=0, lr=0.0)
    return result.loss, result.mtp_loss


def test_ranks_of_a_tensor_report_its_loss_once() -> None:
    """All of them have the same, as of the next token."""
    (alone,) = run_ranks(1, reported, make_folding(world=1))
    assert alone[1] > 0
    for found in run_ranks(2, reported, make_folding(world=2, tp=2)):
        assert found == pytest.approx(alone, rel=1e-10)


def test_validation_and_generation_do_not_run_it() -> None:
    model, batch = model_and_batch()
    output = model(batch, ForwardInfo(phase="eval"))
    assert output.mtp_TH == () and output.moe_layers == (0, 1)
    output = model(batch, ForwardInfo())
    assert len(output.mtp_TH) == 2 and output.moe_layers == (0, 1, 2, 3)


def test_tables_of_the_plan() -> None:
    spec = small_model("mtp", **GROUPED)
    table = {p.name: p for p in parameters(spec)}
    assert table["embedding.weight"].family == "dense_tied" and spec.moe_layers == (0, 1, 2, 3)
    assert table["layers.3.join.weight"].shape == (32, 64) and "layers.3.moe.experts.w13" in table
    plan = assign_stages(spec, (0, 1), seq_len=SEQ_LEN)
    assert plan.table_ranks == (0, 1)
    held = {p.name for p in stage_params(spec, [plan.stages[1]])}
    assert {"embedding.weight", "layers.2.join.weight", "head.weight"} <= held
    assert not any(p.name.startswith("layers.2.") for p in stage_params(spec, [plan.stages[0]]))
    plain = dataclasses.replace(spec, mtp_layers=0)
    more = flops_per_token(spec, SEQ_LEN) - flops_per_token(plain, SEQ_LEN)
    costs = layer_costs(spec, seq_len=SEQ_LEN)
    assert (
        costs.total == flops_per_token(spec, SEQ_LEN) and costs.head == layer_costs(plain, seq_len=SEQ_LEN).head + more
    )
    assert more == 2 * (costs.blocks[1] + 6 * (2 * 32 * 32 + 32 * 64))
    with pytest.raises(ConfigError, match=r"model\.mtp_weight = 0\.5: has no effect: model\.mtp_layers is 0"):
        resolve_model(ModelConfig(preset="tiny", mtp_weight=0.5), RouterConfig())


# ---- Hugging Face ---------------------------------------------------------------------------------------------------------------


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (extra `hf`)"
)


def save_with_mtp(folder: Path) -> tuple[Any, Any]:
    """A DeepSeek-V3 of transformers in float64 with one block of multi-token prediction, on disk as it is published."""
    from transformers.modeling_layers import MtpModel

    main = hf_model("deepseek_v3", torch.float64, num_nextn_predict_layers=1)
    with in_float64():
        further = MtpModel(main, 1).to(torch.float64).train()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, tensor in further.layers.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            scale = 0.02 if name.endswith("correction_bias") else 0.2
            tensor.copy_(noise * scale + float(scale == 0.2) if tensor.dim() == 1 else noise / tensor.shape[-1] ** 0.5)
    main.save_pretrained(folder)
    body = load_file(folder / "model.safetensors")
    at = f"model.layers.{main.config.num_hidden_layers}."
    body[at + "embed_tokens.weight"] = body["model.embed_tokens.weight"].clone()
    body[at + "shared_head.head.weight"] = body["lm_head.weight"].clone()
    for name, tensor in further.layers[0].state_dict().items():
        body |= _on_disk(at, name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm."), tensor)
    save_file({n: t.contiguous() for n, t in body.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return main, further


def _on_disk(at: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if name.endswith("experts.gate_up_proj"):
        head = at + name.removesuffix("gate_up_proj")
        parts = {
            f"{head}{e}.{w}_proj.weight": p
            for e, t in enumerate(tensor)
            for w, p in zip(("gate", "up"), t.chunk(2), strict=True)
        }
        return {n: p.clone() for n, p in parts.items()}
    if name.endswith("experts.down_proj"):
        head = at + name.removesuffix("down_proj")
        return {f"{head}{e}.down_proj.weight": t.clone() for e, t in enumerate(tensor)}
    return {at + name: tensor.clone()}


def read(rank: int, cache: GroupCache, folder: Path, folding: Folding) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, loss of further tokens, and this rank's gradients (one rank: whole ones)."""
    checkpoint = open_checkpoint(folder, mtp_layers=1)
    parts: StepParts = parts_of(rank, cache, checkpoint, folding, torch.float64)
    with BoxReader(checkpoint) as reader:
        reader.fill(parts.state.boxes())
    parts.state.restore(parts.comms)
    tokens, labels = tokens_and_labels()
    batch = TokenBatch(
        tokens, labels, torch.arange(tokens.shape[1]).expand_as(tokens), ((tokens.shape[1],),) * len(tokens)
    )
    recorder = GradientRecorder(parts.optimizer)
    result = train_step(dataclasses.replace(parts, optimizer=recorder), [part_of(batch, folding, rank)], step=0, lr=0.0)
    assert recorder.gradients is not None
    boxes = recorder.gradients.boxes()
    whole = {b.name.removeprefix("gradient/"): torch.zeros(b.shape, dtype=torch.float64) for b in boxes}
    for box in boxes:
        whole[box.name.removeprefix("gradient/")][box.box.slices()] = box.tensor
    return result.loss, result.mtp_loss, whole


@needs_transformers
def test_it_computes_what_transformers_does(tmp_path: Path) -> None:
    """Hidden states of transformers' own block for further tokens, with its gradients into the whole model."""
    main, further = save_with_mtp(tmp_path)
    tokens, labels = tokens_and_labels()
    ahead, later = tokens[:, 1:], labels[:, 1:]
    positions = torch.arange(tokens.shape[1] - 1).unsqueeze(0)
    with in_float64():
        hidden = main.model(input_ids=tokens, use_cache=False).last_hidden_state
        loss = F.cross_entropy(main.lm_head(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        out = further.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ahead)
        logits = main.lm_head(out).flatten(0, 1)
        more = F.cross_entropy(logits, later.flatten(), ignore_index=IGNORE, reduction="sum") / labels.ne(IGNORE).sum()
        (loss + 0.3 * more).backward()
    folder = tmp_path
    (got_loss, got_more, gradients), *_ = run_ranks(1, read, folder, make_folding(world=1))
    assert got_loss == pytest.approx(loss.item(), rel=1e-10) and got_more == pytest.approx(more.item(), rel=1e-10)
    theirs = type("Theirs", (), {"gradients": {n: p.grad for n, p in main.named_parameters()}})()
    for name, want in logical_gradients(folder, theirs).items():
        assert (gradients[name] - want).abs().max() < 1e-10 * want.abs().max(), name
    layer, block = main.config.num_hidden_layers, further.layers[0]
    for ours, theirs_grad in (
        ("token_norm.weight", block.enorm.weight.grad),
        ("hidden_norm.weight", block.hnorm.weight.grad),
        ("join.weight", block.eh_proj.weight.grad),
        ("norm.weight", block.post_norm.weight.grad),
        ("attention.wkv_b.weight", block.mtp_block.self_attn.kv_b_proj.weight.grad),
        ("moe.experts.w2", block.mtp_block.mlp.experts.down_proj.grad),
    ):
        got = gradients[f"layers.{layer}.{ours}"]
        assert (got - theirs_grad).abs().max() < 1e-10 * theirs_grad.abs().max(), ours


@needs_transformers
def test_blocks_come_in_where_asked_for_and_go_out(tmp_path: Path) -> None:
    from phalanx.runtime.processes.launch import StopRequest
    from phalanx.runtime.processes.world import WorldInfo
    from phalanx.train.huggingface import export_hf
    from phalanx.train.huggingface.import_hf import import_rank, plan_import

    folder = tmp_path / "v3"
    save_with_mtp(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    tokenizer = tmp_path / "tokenizer.json"
    _small_tokenizer(tokenizer)
    left = open_checkpoint(folder)
    assert left.spec.mtp_layers == 0 and any("eh_proj" in name for name in left.ignored)
    with pytest.raises(CheckpointError, match=r"model\.mtp_layers = 2: the checkpoint has 1 blocks"):
        open_checkpoint(folder, mtp_layers=2)
    checkpoint = open_checkpoint(folder, mtp_layers=1)
    assert sorted(n.rsplit(".", 2)[-2] for n in checkpoint.ignored) == ["embed_tokens", "head"]
    words = ["--model.mtp_layers", "1", "--train.dtype", "float64", "--run.folder", str(tmp_path / "runs")]
    words += ["--data.tokenizer", str(tokenizer)]
    job = plan_import(checkpoint, words)
    assert job.recipe.model.mtp_layers == 1
    import_rank(job, WorldInfo(), StopRequest())
    plan = export_hf.plan_export(tmp_path / "runs" / "v3", tmp_path / "out")
    with new_folder(plan.target, writer="export"):
        export_hf.write_shards(plan)
        export_hf.finish_export(plan)
    want, got = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    biases = [n for n in want if n.endswith("correction_bias")]
    assert want.keys() == got.keys() and all(torch.equal(want[n], got[n]) for n in want if n not in biases)
    assert all(torch.equal(want[n].float(), got[n]) for n in biases)  # fp32 in a run
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def _small_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(path))
