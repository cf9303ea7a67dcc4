"""Planted silent corruption: single flipped bits, which of them are found before the step is committed, and what looking for them costs.

Ranks train the model of `recipes/laptop.toml` for some steps. Then each flip is planted in a step of its own, from the same state and the same samples, so that what it does to loss
and gradient norm is known against the step without it; nothing of it is committed:

    state      parameters after they were published; master weights and moments after an update, looked at by the next one
    messages   what a rank gets of another, on its way
    products   results of matrix products and of attention, forward and backward; every second flip in the exponent, where most of those are that matter
    elsewhere  results that were looked at and wait for their use: nothing sees those, what they do is reported

A flip *matters* where loss or gradient norm change by more than 1e-3 of themselves. A number that is not finite anywhere is found by the vote. Then steps with and without checks take turns
on the same ranks: cost, and alarms though nothing was planted.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.config import ModelConfig, OptimConfig, RouterConfig
from phalanx.core.errors import ConfigError, Problem, UnsoundError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models.context import TokenBatch
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.model.model import resolve_model
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.processes.allocator import keep_freed_memory
from phalanx.runtime.processes.launch import StopRequest, run_local
from phalanx.runtime.processes.world import WorldInfo, close_world, init_world
from phalanx.train.assembly import assemble
from phalanx.train.step.check import look
from phalanx.train.step.transaction import ReducedStep, StepParts, _compute, commit_step, reduce_step, train_step
from phalanx_lab.faults.flips import Aim, BitFlip, FlippedMessages, FlippedProducts
from phalanx_lab.plain_model import plain_context

SHARES = {"state": 0.2, "messages": 0.2, "products": 0.5, "elsewhere": 0.1}
"""Of the flips, by kind."""
MATTERS = 1e-3
LR = 1e-3
KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class FlipsCase:
    """What is planted, and in what."""

    flips: int = 300
    preset: str = "laptop"
    ranks: int = 4
    ep: int = 2
    micro_batch: int = 8
    """Sequences of each rank."""
    seq_len: int = 256
    vocab: int = 8192
    dtype: str = "bfloat16"
    warm: int = 20
    """Steps before the first flip."""
    rounds: int = 30
    """Steps with and without checks, in turn, for the cost."""
    sound: int = 0
    """Further steps with checks in which nothing is planted, for false alarms."""
    seed: int = 0
    found_bar: float = 0.95
    cost_bar: float = 1.03
    """Exit status 1 where fewer flips that matter are found in products, or a step takes more than so many times that without checks."""


@dataclass(frozen=True, kw_only=True)
class FlipsArgs:
    """Planted flips of single bits."""

    case: Annotated[FlipsCase, tyro.conf.arg(name="")] = field(default_factory=FlipsCase)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench flips ARGS...`; 1 where a bar is missed."""
    options = read_words(FlipsArgs, args, prog="phalanx bench flips", description=__doc__)
    raise_if(_problems(options.case), ConfigError, subject="the options")
    check_writable(options.json)
    report = measure(options.case)
    print(describe(report))
    write_json(options.json, report)
    return 0 if report["passed"] else 1


def _problems(case: FlipsCase) -> list[Problem]:
    # so many flips have some of each kind
    found = too_small(case, flips=10, ranks=2, ep=1, micro_batch=1, seq_len=2, warm=2, rounds=1, sound=0)
    if case.dtype not in ("float32", "bfloat16"):
        found.append(Problem(where="--dtype", value=case.dtype, rule="must be float32 or bfloat16", hint="bfloat16"))
    return found


def measure(case: FlipsCase) -> dict[str, Any]:
    """Flips one by one, then the cost."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        code = run_local(lambda info, stop: _rank(case, info, stop, path), ranks=case.ranks, threads=1)
        if code:
            raise SystemExit(code)
        told = json.loads(path.read_text())
    return evaluate(told, case)


def evaluate(told: dict[str, Any], case: FlipsCase) -> dict[str, Any]:
    """Rates by kind, places that were missed, ratios of cost."""
    rates = {kind: _rate([f for f in told["flips"] if f["kind"] == kind]) for kind in SHARES}
    ratios = {
        kind: statistics.median(b / a for a, b in zip(told["plain"][kind], told["checked"][kind], strict=True))
        for kind in ("cpu_s", "step_s")
    }
    missed = [f for f in told["flips"] if f["matters"] and not f["found"] and f["kind"] != "elsewhere"]
    passed = (
        all(rates[kind]["found"] == rates[kind]["planted"] for kind in ("state", "messages"))
        and rates["products"]["matter_found"] >= case.found_bar * rates["products"]["matter"]
        and told["alarms"] == 0
        and ratios["cpu_s"] <= case.cost_bar
    )
    return {
        "passed": passed,
        "rates": rates,
        "missed": missed,
        "cpu_ratio": ratios["cpu_s"],
        "step_ratio": ratios["step_s"],
        "alarms": told["alarms"],
        "sound_steps": told["sound_steps"],
        "checks_per_step": told["checks_per_step"],
        "case": vars(case),
        "flips": told["flips"],
        "plain": told["plain"],
        "checked": told["checked"],
    }


def _rate(flips: Sequence[dict[str, Any]]) -> dict[str, Any]:
    matter = [f for f in flips if f["matters"]]
    places: dict[str, list[int]] = {}
    for f in flips:
        count = places.setdefault(f["place"].split(" [")[0].split("/")[0], [0, 0, 0, 0])
        for i, true in enumerate((True, f["found"], f["matters"], f["matters"] and f["found"])):
            count[i] += bool(true)
    return {
        "planted": len(flips),
        "found": sum(f["found"] for f in flips),
        "matter": len(matter),
        "matter_found": sum(f["found"] for f in matter),
        "by_place": {
            place: dict(zip(("planted", "found", "matter", "matter_found"), n, strict=True))
            for place, n in sorted(places.items())
        },
    }


def describe(report: dict[str, Any]) -> str:
    """The figures for a person."""
    lines = ["flips of single bits: planted, found, of those that change loss or gradient norm by more than 1e-3"]
    for kind, r in report["rates"].items():
        lines.append(
            f"  {kind:<10} {r['planted']:4d} planted  {r['found']:4d} found   {r['matter_found']} of {r['matter']} that matter"
        )
    lines += [
        f"  missed: {f['place']}, bit {f['bit']} of {f['of']} on rank {f['rank']}, loss {f['loss_change']:.2g}, norm {f['norm_change']:.2g}"
        for f in report["missed"]
    ]
    lines.append(
        f"  {report['alarms']} alarms in {report['sound_steps']} sound steps of {report['checks_per_step']:.0f} checks a rank"
    )
    lines.append(
        f"  cost: CPU time {report['cpu_ratio']:.3f}x, a step {report['step_ratio']:.3f}x (medians of ratios over rounds in turn)"
    )
    return "\n".join(lines)


# ---- one rank ----------------------------------------------------------------------------------------------------------------


class _Bench:
    """This rank's parts, with flips and without checks, and one step to plant in."""

    def __init__(self, case: FlipsCase, info: WorldInfo) -> None:
        self.case, self.rank = case, info.rank
        rows, cache = compiled_rows(), GroupCache(timeout_s=600.0)
        folding = make_folding(world=case.ranks, ep=case.ep)
        self.products, self.messages = FlippedProducts(), FlippedMessages(info.rank, rows=rows)
        self.parts = _parts(case, folding, info.rank, cache, products=self.products, messages=self.messages)
        self.plain = _parts(case, folding, info.rank, cache)
        self.alarms = self.sound = 0

    def batch(self, number: int) -> list[TokenBatch]:
        """Tokens that are not equally likely, and often follow one another, so that there is something to learn."""
        case, draw = self.case, np.random.default_rng((self.case.seed, number, self.rank))
        tokens = np.minimum(draw.zipf(1.3, (case.micro_batch, case.seq_len + 1)), case.vocab) - 1
        tokens[:, 1::2] = (7 * tokens[:, 0:-1:2] + 3) % case.vocab
        whole = torch.from_numpy(tokens.astype(np.int64))
        positions = torch.arange(case.seq_len).expand(case.micro_batch, -1)
        return [
            TokenBatch(
                whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), positions, ((case.seq_len,),) * case.micro_batch
            )
        ]

    def attempt(self) -> tuple[float, float, bool]:
        """Loss and norm of the planted step as it is made first, and whether something was found in it."""
        tally = _compute(self.parts, self.planted, step=self.case.warm, stop=False, bits=None)[1]
        found = bool(look(self.parts)) or self.messages.outvoted > 0 or not tally.finite
        self.messages.outvoted = 0
        return tally.loss, tally.grad_norm, found

    def begin(self) -> None:
        """The step that flips are planted in, and what it is without one."""
        for number in range(self.case.warm):
            self.sound_step(number)
        self.planted = self.batch(self.case.warm)
        self.aim()
        self.loss, self.norm, _ = self.attempt()
        self.events = {
            "messages": self.messages.way.events,
            "products": self.products.made.events,
            "elsewhere": self.products.left.events,
        }

    def sound_step(self, number: int) -> None:
        self.aim()
        reduced = reduce_step(self.parts, self.batch(number), step=number, lr=LR)
        self.alarms += len(reduced.findings)
        self.sound += 1
        commit_step(self.parts, reduced)
        self.parts.state.publish(self.parts.comms)

    def aim(self, kind: str = "", at: float = 0.0, flip: BitFlip | None = None) -> Aim | None:
        """Where the flip of the next step goes; None: nowhere."""
        ways = {"messages": self.messages.way, "products": self.products.made, "elsewhere": self.products.left}
        for name, way in ways.items():
            way.begin(*((int(at * self.events[name]), flip) if name == kind else ()))
        return ways.get(kind)

    def plant(self, kind: str, target: int, at: float, flip: BitFlip) -> dict[str, Any]:
        """One flip in a product, in a message or elsewhere."""
        here = self.rank == target
        aim = self.aim(kind, at, flip) if here else self.aim()
        loss, norm, found = self.attempt()
        return self.told(kind, target, "" if aim is None else aim.hit, flip, loss=loss, norm=norm, found=found)

    def plant_parameter(self, target: int, at: float, flip: BitFlip) -> dict[str, Any]:
        """One flip in the parameters of a family."""
        families = self.parts.state.families
        name = list(families)[int(at * len(families))]
        flat = families[name].flat
        if self.rank == target:
            flip(flat)
        self.aim()
        loss, norm, found = self.attempt()
        if self.rank == target:
            self.back(flat, flip)
        return self.told("state", target, f"parameters of {name}", flip, loss=loss, norm=norm, found=found)

    @staticmethod
    def back(x: torch.Tensor, flip: BitFlip) -> None:
        kept = dict(flip.was)
        flip(x)
        flip.was = kept

    def told(
        self, kind: str, target: int, place: str, flip: BitFlip, *, loss: float, norm: float, found: bool
    ) -> dict[str, Any]:
        """The same on all ranks: the target knows the place."""
        world = self.parts.groups.axis("world")
        said = self.parts.comms.gather_objects((place, flip.was, found), world)
        (where, was, _), found = said[target], any(each for *_, each in said)
        changes = [
            abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in ((loss, self.loss), (norm, self.norm))
        ]
        return {
            "kind": kind, "rank": target, "place": where, "bit": was.get("bit", -1), "of": was.get("of", 0), "before": repr(was.get("before")),
            "after": repr(was.get("after")), "found": found, "matters": max(changes) > MATTERS,
            "loss_change": _finite(changes[0]), "norm_change": _finite(changes[1]),
        }  # fmt: skip

    def plant_moments(self, flips: Sequence[tuple[int, float, BitFlip]]) -> list[dict[str, Any]]:
        """Flips in masters and moments between two updates; each update is taken back."""
        self.aim()
        state, sums = self.parts.state, self.parts.state.sums
        assert sums is not None
        before = _copy(self.parts)
        reduced = reduce_step(self.parts, self.planted, step=self.case.warm, lr=LR)
        commit_step(self.parts, reduced)
        kept, known, out = _copy(self.parts), dict(sums._known), []
        for target, at, flip in flips:
            name = list(state.families)[int(at * 997) % len(state.families)]
            kind = KINDS[int(at * 101) % 3]
            if self.rank == target:
                flip(getattr(state.families[name], kind))
            found = self._commit_finds(reduced)
            out.append(
                self.told("state", target, f"{kind} of {name}", flip, loss=self.loss, norm=self.norm, found=found)
            )
            _put_back(self.parts, kept)
            sums._known.clear()
            sums._known.update(known)
        _put_back(self.parts, before)
        sums.forget()
        state.publish(self.parts.comms)
        return out

    def _commit_finds(self, reduced: ReducedStep) -> bool:
        """Whether the commit of some rank raises."""
        try:
            commit_step(self.parts, reduced)
            found = False
        except UnsoundError:
            found = True
        return any(self.parts.comms.gather_objects(found, self.parts.groups.axis("world")))


def _copy(parts: StepParts) -> list[torch.Tensor]:
    return [x.clone() for f in parts.state.families.values() for x in (f.flat, f.master, f.exp_avg, f.exp_avg_sq)]


def _put_back(parts: StepParts, kept: Sequence[torch.Tensor]) -> None:
    now = [x for f in parts.state.families.values() for x in (f.flat, f.master, f.exp_avg, f.exp_avg_sq)]
    for x, was in zip(now, kept, strict=True):
        x.copy_(was)


def _finite(x: float) -> float:
    """JSON has no infinity."""
    return min(x, 1e300)


def _rank(case: FlipsCase, info: WorldInfo, stop: StopRequest, path: Path) -> int:
    torch.set_num_threads(1)
    keep_freed_memory(threads=1)
    init_world(info, device="cpu", timeout_s=600.0)
    bench = _Bench(case, info)
    bench.begin()
    flips = _planted(bench)
    plain, checked = _cost(bench)
    for number in range(case.sound):
        bench.sound_step(case.warm + case.rounds + 2 + number)
    if info.rank == 0:
        told = {
            "flips": flips, "plain": plain, "checked": checked, "alarms": bench.alarms, "sound_steps": bench.sound,
            "checks_per_step": bench.events["products"] + bench.events["messages"],
        }  # fmt: skip
        path.write_text(json.dumps(told))
    bench.parts.comms.barrier(bench.parts.groups.axis("world"))
    close_world()
    return 0


def _planted(bench: _Bench) -> list[dict[str, Any]]:
    case, draw = bench.case, np.random.default_rng(bench.case.seed)  # the same on all ranks

    def one(exponent: bool = False) -> tuple[int, float, BitFlip]:
        flip = BitFlip(float(draw.random()), float(draw.random()), exponent=exponent)
        return int(draw.integers(case.ranks)), float(draw.random()), flip

    out: list[dict[str, Any]] = []
    for kind, share in SHARES.items():
        number = round(share * case.flips)
        if kind == "state":
            out += [bench.plant_parameter(*one()) for _ in range(number // 2)]
            out += bench.plant_moments([one() for _ in range(number - number // 2)])
        else:
            out += [bench.plant(kind, *one(i % 2 == 1 and kind != "messages")) for i in range(number)]
    return out


def _cost(bench: _Bench) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of steps without and with checks, as they are in a run: without planted flips, the same bits."""
    times: dict[bool, dict[str, list[float]]] = {on: {"cpu_s": [], "step_s": []} for on in (False, True)}
    bench.products.__class__ = type("Sound", (FlippedProducts,), {"looks_late": True})
    bench.parts.state.publish(bench.parts.comms)
    for number in range(bench.case.warm, bench.case.warm + bench.case.rounds + 2):
        batches = bench.batch(number)
        for on in (number % 2 == 0, number % 2 == 1):
            cpu_s, step_s = _timed(bench, batches, number, checked=on)
            if number >= bench.case.warm + 2:
                times[on]["cpu_s"].append(cpu_s)
                times[on]["step_s"].append(step_s)
    return times[False], times[True]


def _timed(bench: _Bench, batches: list[TokenBatch], number: int, *, checked: bool) -> tuple[float, float]:
    """CPU seconds of all ranks, and the slowest rank's seconds."""
    parts = bench.parts if checked else bench.plain
    world = parts.groups.axis("world")
    parts.comms.barrier(world)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    if checked:
        bench.sound_step(number)
    else:
        train_step(parts, batches, step=number, lr=LR)
    mine = time.process_time() - begin_cpu_s, time.perf_counter() - begin_s
    told = parts.comms.gather_objects(mine, world)
    return sum(cpu for cpu, _ in told), max(seconds for _, seconds in told)


def _parts(
    case: FlipsCase,
    folding: Folding,
    rank: int,
    cache: GroupCache,
    *,
    products: FlippedProducts | None = None,
    messages: FlippedMessages | None = None,
) -> StepParts:
    """As a run of the recipe has them: every shard on two ranks."""
    spec = resolve_model(ModelConfig(preset=case.preset), RouterConfig(), tokenizer_vocab=case.vocab)
    ctx = plain_context(
        spec, build_groups(folding, rank=rank, cache=cache), dtype=getattr(torch, case.dtype),
        comms=Collectives(timeout_s=600.0, sums=messages), lanes=Lanes(1, rows=compiled_rows(), sums=products),
    )  # fmt: skip
    return assemble(ctx, optim=OptimConfig(), num_microbatches=1, samples=case.ranks, holders=2)
