"""One MoE layer, serial, in coarse chunks and by our schedules: `phalanx bench layer --json F`, on the testbed.

Two emulated hosts with one rank of one thread each hold half of the experts each. On a link without limit the ranks measure what the layer
computes and how much it sends; then the link gets the rate at which a forward pass communicates for `--share` of the time it computes. On that
link all methods take turns in one run: the serial layer (as Megatron), chunks of tokens (as FasterMoE and Tutel), our schedules with
each idea by itself and together, the layer's compute alone and its communication alone. Medians over iterations; in each the slowest rank
counts. Output and gradients of every method are compared with those of the serial layer; where one is wrong the exit status is 1.

Figures, for forward and for forward + backward, t being a method's seconds:

    hidden                (communication + compute - t) / min(communication, compute): of what could be hidden, the share that is
    hidden_of_comm        1 - (t - compute) / communication, COMET's: the share of the communication's time that is gone; it cannot be 1 where
                          communication takes longer than compute, and may pass 1 where a method computes or sends less than the serial layer
    comm_share            communication / serial
    speedup_vs_serial     serial / t
    speedup_vs_best_coarse  best of the coarse methods / t
    time_over_bound       t / max(compute, least communication)

*communication* is that of the serial layer, a row for each (token, expert) pair; the *least* has a row for each token that a host needs.
Every method is a layer as a run has it, by a value of `dispatch.overlap` (`methods.py`). `auto` is that of a run: its calibration on this link, its cost model, its choice for each batch; it knows nothing of the
seconds of the other methods. How far it stays behind the best of these is its regret (`scores.py`). With `--cells` the same is done over a grid of shapes, loads, links and types (`cells.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, DataError, Problem, raise_if
from phalanx.core.files import check_writable, read_json, write_json
from phalanx.core.units import format_bytes, format_rate
from phalanx.runtime.processes.world import close_world
from phalanx_lab.bench.layer import cells as layer_cells
from phalanx_lab.bench.layer.loads import load_vector
from phalanx_lab.bench.layer.methods import AUTO, COARSE, METHODS, SERIAL
from phalanx_lab.bench.layer.rank import (
    MESSAGES,
    BenchLayer,
    BenchLayerShape,
    RankPlace,
    as_lists,
    fit_link,
    take_turns,
)
from phalanx_lab.bench.layer.scores import figures, medians, regret
from phalanx_lab.bench.rank_jobs import run_ranks, tell
from phalanx_lab.testbed import links
from phalanx_lab.testbed.cluster import ClusterSpec

LONGEST_S = 1500.0
"""Seconds that a layer may take; with `--cells`, that a cell may take in the mean."""
COMPUTE = f"compute {SERIAL}"
OURS_ALONE = ("compute tiles", "compute dedup")
"""What our tiles compute with nothing travelling: the rest of our time is what is not hidden, and what the transport takes from computing."""


@dataclass(frozen=True, kw_only=True)
class LayerArgs:
    """One MoE layer by every method, on two emulated hosts."""

    shape: BenchLayerShape = field(default_factory=BenchLayerShape)
    share: float = 1.0
    """Communication over compute of a forward pass; the link is set for it."""
    iterations: int = 16
    methods: tuple[str, ...] = ()
    """Default: all."""
    cells: bool = False
    """The grid instead of one shape."""
    cells_s: float = 520.0
    """Time for the grid."""
    part: str = "1/1"
    """Part `i/n` of the grid: those cells only, put beside the cells that the file of `--json` has."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench layer ARGS...` (or, with `--rank-of FILE`, one rank of it)."""
    if args[:1] == ["--rank-of"]:
        return _rank(Path(args[1]))
    options = read_words(LayerArgs, args, prog="phalanx bench layer", description=__doc__)
    options = replace(options, methods=options.methods or METHODS)
    raise_if(_problems(options), ConfigError, subject="the options")
    load_vector(options.shape.load, num_experts=options.shape.experts, top_k=options.shape.top_k)
    check_writable(options.json)
    before = _cells_before(options)
    result = measure(options)
    if options.cells:
        result = layer_cells.joined(before, result) if before else result
        Console().print(layer_cells.table(result))
    else:
        for direction in ("forward", "forward_backward"):
            Console().print(_table(result, direction))
    for line in result["wrong"]:
        print(line)
    write_json(options.json, result)
    return 1 if result["wrong"] else 0


def _cells_before(options: LayerArgs) -> dict[str, Any]:
    """The result that this part is put beside; raises `DataError` where the file holds something else."""
    if not options.cells or options.part == "1/1" or options.json is None or not options.json.exists():
        return {}
    try:
        found: dict[str, Any] = read_json(options.json, where="--json")
        return layer_cells.joined(found, {"cells": [], "wrong": []})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        rule = f"must be a result of `phalanx bench layer --cells` where there is a file already: {error}"
        raise DataError.of("--json", str(options.json), rule, "name another file", subject="a file") from error


def _problems(options: LayerArgs) -> list[Problem]:
    shape, known = options.shape, METHODS
    least = {"tokens": 1, "hidden": 1, "ffn": 1, "experts": 2, "top_k": 1}
    problems = too_small(options, iterations=2, **{f"shape__{name}": n for name, n in least.items()})
    if shape.experts % 2:
        rule = "must be even: each of two ranks holds half of them"
        problems.append(Problem(where="--shape.experts", value=shape.experts, rule=rule, hint="use 8"))
    if shape.top_k > shape.experts:
        rule = f"must be at most the number of experts ({shape.experts})"
        problems.append(Problem(where="--shape.top-k", value=shape.top_k, rule=rule, hint="use 2"))
    if shape.dtype not in ("float32", "bfloat16"):
        rule = "must be float32 or bfloat16"
        problems.append(Problem(where="--shape.dtype", value=shape.dtype, rule=rule, hint="use float32"))
    if not options.share > 0:
        rule = "must be above 0"
        problems.append(Problem(where="--share", value=options.share, rule=rule, hint="use 1"))
    try:
        layer_cells.part_of(options.part)
    except ValueError:
        rule = f"must be i/n, i from 1 to n, and n at most {len(layer_cells.cells())}"
        problems.append(Problem(where="--part", value=options.part, rule=rule, hint="use 1/3"))
    if options.part != "1/1" and not (options.cells and options.json):
        rule = "needs --cells, and --json with the file that gathers the parts"
        problems.append(Problem(where="--part", value=options.part, rule=rule, hint="add --cells --json cells.json"))
    strays = [name for name in options.methods if name not in known]
    if strays or not {SERIAL, AUTO} <= {*options.methods}:
        rule = f"must be some of {', '.join(known)}; {SERIAL} and {AUTO} among them"
        problems.append(Problem(where="--methods", value=list(options.methods), rule=rule, hint="leave it out"))
    return problems


def measure(options: LayerArgs) -> dict[str, Any]:
    """All of it in one bed. Raises `RunError` where a rank fails."""
    job, spec = {**asdict(options), "json": None}, ClusterSpec(hosts=2, ranks_per_host=1)
    timeout_s = LONGEST_S * (len(layer_cells.part_of(options.part)) if options.cells else 1)
    found: dict[str, Any] = run_ranks("layer", job, spec, timeout_s=timeout_s, grain=links.COARSE, own_cores=True)
    return found if options.cells else _result(options, found)


def _result(options: LayerArgs, found: Mapping[str, Any]) -> dict[str, Any]:
    """Medians and figures of what the ranks have measured."""
    result: dict[str, Any] = {key: found[key] for key in ("link_bit_per_s", "sent_bytes", "wrong", "seconds")}
    result |= {"shape": asdict(options.shape), "iterations": options.iterations, "paced": False}
    for direction in ("forward", "forward_backward"):
        lists = {method: times[direction] for method, times in found["seconds"].items()}
        seconds = medians(lists)
        compute_s, messages_s, least_s = (seconds.pop(name) for name in (COMPUTE, *MESSAGES))
        alone = {method: seconds.pop(method) for method in OURS_ALONE}
        behind = regret({method: lists[method] for method in options.methods})
        coarse = min((seconds[m] for m in options.methods if m in COARSE), default=None)
        each = {
            method: figures(t, compute_s=compute_s, messages_s=messages_s, least_s=least_s, serial_s=seconds[SERIAL], coarse_s=coarse)
            for method, t in seconds.items()
        }  # fmt: skip
        result[direction] = {
            "compute_s": compute_s,
            "compute_ours_s": alone,
            "communication_s": messages_s,
            "least_communication_s": least_s,
            "bound_s": max(compute_s, min(messages_s, least_s)),
            "seconds": seconds,
            "methods": each,
            "auto": found["auto"],
            "regret": asdict(behind),
            **each[AUTO],
        }
    return result


def _table(result: Mapping[str, Any], direction: str) -> Table:
    of = result[direction]
    shape = BenchLayerShape(**result["shape"])
    table = Table(
        title=f"{direction.replace('_', ' + ')}: {shape.tokens} tokens a rank, hidden {shape.hidden}, ffn {shape.ffn}, "
        f"{shape.experts} experts, top {shape.top_k}, {shape.dtype}; link {format_rate(result['link_bit_per_s'], 'bit')}",
        caption=f"medians of {result['iterations']}; compute {of['compute_s'] * 1e3:.1f} ms (by tiles {of['compute_ours_s']['compute tiles'] * 1e3:.1f}), communication {of['communication_s'] * 1e3:.1f} ms, "
        f"with a row for each token and host {of['least_communication_s'] * 1e3:.1f} ms; auto took {of['auto']}: {of['regret']['ratio']:.3f} of the seconds of {of['regret']['best']}, "
        f"{of['regret']['to_least']:.3f} of the least",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for title in ("ms", "sent", "hidden", "of comm", "/ serial", "/ coarse", "x bound"):
        table.add_column(title, justify="right", no_wrap=True)
    for method, seconds in of["seconds"].items():
        f = of["methods"][method]
        sent = result["sent_bytes"].get(method)
        coarse = f["speedup_vs_best_coarse"]
        table.add_row(
            method,
            f"{seconds * 1e3:.1f}",
            "" if sent is None else format_bytes(sent[direction]),
            f"{f['hidden']:.1%}",
            f"{f['hidden_of_comm']:.1%}",
            f"{f['speedup_vs_serial']:.2f}",
            "" if coarse is None else f"{coarse:.2f}",
            f"{f['time_over_bound']:.3f}",
        )
    return table


# ---- one rank ----------------------------------------------------------------------------------------------------------------


def _rank(job_file: Path) -> int:
    job = json.loads(job_file.read_text())
    place, methods = RankPlace(job_file), tuple(job["methods"])
    if job["cells"]:
        found: Any = layer_cells.run(place, methods, seconds=job["cells_s"], part=job["part"])
    else:
        layer = BenchLayer(place, BenchLayerShape(**job["shape"]))
        wrong = layer.wrong(methods[1:])
        rate = fit_link(layer, share=job["share"])
        layer.calibrate()
        clocked = take_turns(layer, [*methods, COMPUTE, *OURS_ALONE, *MESSAGES], iterations=job["iterations"])
        found = {
            "link_bit_per_s": rate,
            "auto": layer.choice(),
            "sent_bytes": {method: layer.sent_bytes(method) for method in methods},
            "wrong": wrong,
            "seconds": as_lists(clocked),
        }
    if place.rank == 0:
        tell(job_file, found)
    place.comms.barrier(place.axis)
    close_world()
    return 0
