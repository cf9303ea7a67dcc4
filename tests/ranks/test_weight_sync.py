"""Weights of running ranks, delivered again and again: whole versions, two sets of tensors, one integer each."""

from __future__ import annotations

import re

import pytest
import torch
from reshard_help import equal_hosts

from phalanx.core.errors import PlanError
from phalanx.plan.layout.mesh.placements import Replicate, Shard, mesh_layout
from phalanx.plan.layout.tensors import whole_layout
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.reshard.resharder import Resharder
from phalanx.runtime.reshard.weight_sync import WeightSync
from ranks import run_ranks

pytestmark = pytest.mark.ranks
SHAPES = {"up": (8, 6), "down": (6, 8), "bias": (5,)}
DTYPES = {"up": torch.bfloat16, "down": torch.bfloat16, "bias": torch.float32}


def layouts():
    """tp 2 on ranks 0 and 1 to tp 3 on ranks 2 to 4."""
    src = {
        "up": mesh_layout(SHAPES["up"], [2], [Shard(0)]),
        "down": mesh_layout(SHAPES["down"], [2], [Shard(1)]),
        "bias": mesh_layout(SHAPES["bias"], [2], [Replicate()]),
    }
    dst = {
        "up": mesh_layout(SHAPES["up"], [3], [Shard(0)], ranks=[2, 3, 4]),
        "down": mesh_layout(SHAPES["down"], [3], [Shard(1)], ranks=[2, 3, 4]),
        "bias": whole_layout(SHAPES["bias"], [4]),
    }
    return src, dst


def local(full, layout, rank):
    out = torch.empty(layout.local_shapes[layout.ranks.index(rank)], dtype=full.dtype)
    for held in layout.of_rank(rank):
        out[held.local_box().slices()] = full[held.box.slices()]
    return out


def value(name, step):
    n = torch.arange(torch.Size(SHAPES[name]).numel()).view(SHAPES[name])
    return (n % 17 + 100 * step).to(DTYPES[name])


def deliveries(rank, cache):
    src, dst = layouts()
    comms = Collectives(timeout_s=10)
    axis = Axis("weights", tuple(range(5)), rank, cache.get(range(5)))
    sync = WeightSync(Resharder(comms, axis, hosts=equal_hosts([0, 0, 1, 1, 1])), src=src, dst=dst, dtypes=DTYPES)
    params = {n: torch.nn.Parameter(local(value(n, 0), src[n], rank)) for n in SHAPES} if rank < 2 else {}
    seen, places = [], set()
    for step in range(4):
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(local(value(name, step), src[name], rank))
        comms.counters.clear()
        before = {n: (x, x.clone()) for n, x in sync.weights.items()}
        got = sync.deliver(params)
        assert got is sync.weights and sync.version == step + 1
        for name, (x, was) in before.items():
            assert torch.equal(x, was) and x is not got[name]  # a reader of the last version was not disturbed
        for name, layout in dst.items():
            if rank in layout.ranks:
                assert torch.equal(got[name], local(value(name, step), layout, rank))
        places |= {x.data_ptr() for x in got.values() if x.numel()}
        seen.append({op: c.calls for (op, _), c in comms.counters.items()})
    return seen, sorted(sync.weights), len(places)


@pytest.mark.core
def test_each_version_comes_whole_and_costs_one_integer():
    for rank, (seen, names, places) in enumerate(run_ranks(5, deliveries)):
        assert all(counts.pop("all_gather") == 1 for counts in seen)
        assert all(set(counts) <= {"send", "receive"} for counts in seen)
        assert names == ([] if rank < 2 else ["bias", "down", "up"] if rank == 4 else ["down", "up"])
        assert places == 2 * len(names)  # two sets of tensors, whatever the number of deliveries


def refusing(rank, cache):
    """The second delivery is refused by a sender: receivers keep the first."""
    src, dst = layouts()
    axis = Axis("weights", tuple(range(5)), rank, cache.get(range(5)))
    resharder = Resharder(Collectives(timeout_s=10), axis, hosts=equal_hosts([0, 0, 1, 1, 1]))
    sync = WeightSync(resharder, src=src, dst=dst, dtypes=DTYPES)
    params = {n: local(value(n, 1), src[n], rank) for n in SHAPES} if rank < 2 else {}
    first = sync.deliver(params)
    if rank == 1:
        del params["up"]
    with pytest.raises(Exception, match=r"rank 1 holds|ranks \[1\] refused"):
        sync.deliver(params)
    assert sync.version == 1 and sync.weights is first
    return all(torch.equal(first[n], local(value(n, 1), dst[n], rank)) for n in first)


def test_a_delivery_that_fails_leaves_the_last_version():
    assert all(run_ranks(5, refusing))


def test_what_is_no_layout_is_named():
    src, dst = layouts()
    resharder = Resharder(Collectives(), Axis("weights", (0,), 0, None), hosts=equal_hosts([0]))
    for changes, text in (
        (
            {"src": src | {"up": ("mesh", ["placement"])}},
            "src['up'] = 'tuple': must be a TensorLayout; give src={NAME: TensorLayout}",
        ),
        (
            {"dst": dst["up"]},
            "dst = 'TensorLayout': must be a dict by name, each a TensorLayout; give dst={NAME: TensorLayout}",
        ),
        ({"dtypes": DTYPES | {"up": "float32"}}, "dtypes['up'] = 'str': must be a dtype; give dtypes={NAME: dtype}"),
    ):
        with pytest.raises(PlanError, match=re.escape(text)):
            WeightSync(resharder, **({"src": src, "dst": dst, "dtypes": DTYPES} | changes))


def test_names_must_agree():
    src, dst = layouts()
    resharder = Resharder(Collectives(), Axis("weights", (0,), 0, None), hosts=equal_hosts([0]))
    with pytest.raises(PlanError) as info:
        WeightSync(resharder, src=src, dst={"up": dst["up"], "x": dst["up"]}, dtypes=DTYPES)
    text = str(info.value)
    assert "dst['bias']: is not in dst" in text and "dst['x']: has no source layout" in text
