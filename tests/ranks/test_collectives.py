"""Collectives over forked gloo ranks: values, gradients, bytes, events, and what happens when a rank goes away."""

from __future__ import annotations

import itertools
import os
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from phalanx.core.errors import ConfigError, RunError
from phalanx.core.events import Collective
from phalanx.plan.mapping.folding import GROUP_AXES, make_folding
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import (
    Counter,
    Exchange,
    Message,
    _Several,
    check_own,
    check_splits_of,
    check_summed,
    is_departure,
)
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups
from phalanx.runtime.comm.row_collectives import backward_id
from phalanx.runtime.comm.sums import MessageSums
from phalanx.runtime.processes import meeting, world
from phalanx.runtime.processes.world import WorldInfo, init_world, read_world
from ranks import RankError, RankTimeout, run_ranks

pytestmark = pytest.mark.ranks


def world_axis(rank, cache, world, name="world"):
    ranks = tuple(range(world))
    return Axis(name, ranks, rank, cache.get(ranks))


def whole_tensors(rank, cache, world):
    axis = world_axis(rank, cache, world)
    comms = Collectives(timeout_s=20)
    x = torch.full((2, 3), float(2**rank))
    assert comms.all_reduce(x, axis) is x
    most = comms.all_reduce(torch.tensor([rank, -rank]), axis, op="max")
    flat = torch.arange(4.0 * world) * (rank + 1)
    shard = comms.reduce_scatter(flat, axis)
    full = comms.all_gather(torch.full((2, 2), float(rank)), axis)
    out = torch.empty(2 * world, 2)
    assert comms.all_gather(torch.full((2, 2), float(rank)), axis, out=out) is out
    told = comms.broadcast(torch.tensor([float(rank)]), axis, root=world - 1)
    comms.barrier(axis)
    names = comms.gather_objects(f"r{rank}", axis)
    counts = {op: (c.calls, c.sent_bytes) for (op, _), c in comms.counters.items()}
    return x, most, shard, full, out, told, names, counts


def any_type(rank, cache, dtype):
    """Rows of a type that gloo's collectives refuse, by every way that moves them: what has come, as bytes in fp64 of the values."""
    axis, comms = world_axis(rank, cache, 2), Collectives(timeout_s=20, check_splits=True)

    def rows(of, num):
        return (torch.arange(num * 3).view(num, 3) + 20 * of).to(dtype)

    x, splits = rows(rank, 3), (1, 2)
    with pytest.raises(ValueError, match=r"all_reduce over world: reduction is not supported for torch\."):
        comms.all_reduce(x.clone(), axis)
    back = (splits[rank],) * 2
    come = torch.empty(2, 3).to(dtype)
    comms.start_exchange([Message(x[:2].contiguous(), 1 - rank, 5)], [Message(come, 1 - rank, 5)], axis).wait()
    single = torch.empty(2, 3).to(dtype)
    ends = [
        comms.start_send(Message(x[1:].contiguous(), 1 - rank, 6), axis),
        comms.start_receive(Message(single, 1 - rank, 6), axis),
    ]
    for end in ends:
        end.wait()
    found = {
        "all to all": comms.all_to_all_rows(x, in_splits=splits, out_splits=back, axis=axis),
        "under way": comms.start_all_to_all_rows(x, in_splits=splits, out_splits=back, axis=axis).wait(),
        "apart": comms.start_all_to_all_apart(x.view(-1), axis, (3, 6), tuple(3 * n for n in back)),
        "even": comms.all_gather_rows(x, sizes=(3, 3), axis=axis),
        "uneven": comms.all_gather_rows(rows(rank, 1 + rank), sizes=(1, 2), axis=axis),
        "gathered": comms.all_gather(x, axis),
        "told": comms.broadcast(x.clone(), axis, root=1),
        "exchanged": come,
        "sent": single,
        "summed": comms.reduce_scatter_rows(x, sizes=splits, axis=axis),
    }
    out, exchange = found["apart"]
    exchange.wait()
    found["apart"] = out.view(-1, 3)
    assert all(value.dtype == dtype for value in found.values())  # type: ignore[attr-defined]
    return {name: value.double() for name, value in found.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16], ids=str)
def test_rows_of_any_type_travel(dtype):
    def rows(of, num):
        return (torch.arange(num * 3).view(num, 3) + 20 * of).to(dtype).double()

    for rank, found in enumerate(run_ranks(2, any_type, dtype)):
        mine = slice(0, 1) if rank == 0 else slice(1, 3)
        here = torch.cat([rows(of, 3)[mine] for of in (0, 1)])
        both = torch.cat([rows(0, 3), rows(1, 3)])
        total = (rows(0, 3) + rows(1, 3))[mine].to(dtype).double()
        want = {
            "all to all": here,
            "under way": here,
            "apart": here,
            "even": both,
            "gathered": both,
            "told": rows(1, 3),
        }
        want |= {"uneven": torch.cat([rows(0, 1), rows(1, 2)]), "summed": total}
        want |= {"exchanged": rows(1 - rank, 3)[:2], "sent": rows(1 - rank, 3)[1:]}
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(found[name], value), name


@pytest.mark.core
@pytest.mark.parametrize("world", [2, 3])
def test_whole_tensors(world):
    for rank, got in enumerate(run_ranks(world, whole_tensors, world)):
        x, most, shard, full, out, told, names, counts = got
        assert torch.equal(x, torch.full((2, 3), float(2**world - 1)))  # powers of two: a rank counted twice would show
        assert most.tolist() == [world - 1, 0]
        total = world * (world + 1) / 2
        assert torch.equal(shard, total * torch.arange(4.0 * rank, 4.0 * rank + 4))
        assert torch.equal(full, torch.arange(float(world)).repeat_interleave(2)[:, None].expand(-1, 2))
        assert torch.equal(out, full)
        assert told.tolist() == [world - 1]
        assert names == [f"r{i}" for i in range(world)]
        assert counts["all_reduce"] == (2, 2 * 24 * (world - 1) // world + 2 * 16 * (world - 1) // world)
        assert counts["reduce_scatter"] == (1, 16 * (world - 1))
        assert counts["all_gather"] == (2, 2 * 16 * (world - 1))
        assert counts["broadcast"] == (1, 4 * (world - 1) if rank == world - 1 else 0)
        assert counts["barrier"] == (1, 0)


def splits_of(world, seed):
    """sends[i][j]: rows from i to j, with zeros and an entirely silent rank."""
    g = torch.Generator().manual_seed(seed)
    sends = torch.randint(0, 4, (world, world), generator=g)
    sends[seed % world] = 0
    return sends.tolist()


def rows_of(rank, n, dtype, dims):
    g = torch.Generator().manual_seed(100 + rank)
    return torch.randn((n, *dims), generator=g, dtype=torch.float64).to(dtype)


def row_case(rank, cache, world, seed, dtype, dims):
    axis = world_axis(rank, cache, world, "ep")
    comms = Collectives(timeout_s=20, check_splits=seed % 2 == 0)
    sends = splits_of(world, seed)
    sizes = [sum(s) for s in sends]
    result = {}
    x = rows_of(rank, sizes[rank], dtype, dims).requires_grad_()
    got = comms.all_to_all_rows(x, in_splits=sends[rank], out_splits=[s[rank] for s in sends], axis=axis)
    got.backward(weight(got, rank))
    result["all_to_all"] = (got.detach(), x.grad)
    x = rows_of(rank, sizes[rank], dtype, dims).requires_grad_()
    got = comms.all_gather_rows(x, sizes=sizes, axis=axis)
    got.backward(weight(got, rank))
    result["all_gather"] = (got.detach(), x.grad)
    x = rows_of(rank, sum(sizes), dtype, dims).requires_grad_()
    got = comms.reduce_scatter_rows(x, sizes=sizes, axis=axis)
    got.backward(weight(got, rank))
    result["reduce_scatter"] = (got.detach(), x.grad)
    result["bytes"] = {op: c.sent_bytes for (op, _), c in comms.counters.items()}
    return result


def weight(x, rank):
    """A gradient that differs in every row and rank."""
    n = torch.arange(x.numel(), dtype=torch.float64).view(x.shape)
    return (torch.sin(n) * (rank + 1)).to(x.dtype)


@pytest.mark.core
@pytest.mark.parametrize(
    "world,dtype,dims", [(2, torch.float64, (3,)), (3, torch.float32, ()), (4, torch.bfloat16, (2, 2))]
)
def test_rows(world, dtype, dims):
    for seed in range(3):
        check_rows(world, seed, dtype, dims, run_ranks(world, row_case, world, seed, dtype, dims))


def check_rows(world, seed, dtype, dims, got):
    sends = splits_of(world, seed)
    sizes = [sum(s) for s in sends]
    own = [rows_of(r, sizes[r], dtype, dims) for r in range(world)]
    pieces = [list(own[r].split(sends[r])) for r in range(world)]
    received = [torch.cat([pieces[i][r] for i in range(world)]) for r in range(world)]
    grads = [list(weight(received[r], r).split([s[r] for s in sends])) for r in range(world)]
    everything = torch.cat(own)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    full = [rows_of(r, sum(sizes), dtype, dims) for r in range(world)]
    total = torch.stack(full).sum(0, dtype=wide).to(dtype).split(sizes)
    copies = torch.stack([weight(everything, r) for r in range(world)]).sum(0, dtype=wide).to(dtype).split(sizes)
    shares = torch.cat([weight(total[r], r) for r in range(world)])
    row = everything[:1].numel() * everything.element_size() if everything.numel() else 0
    for r in range(world):
        y, grad = got[r]["all_to_all"]
        assert torch.equal(y, received[r])
        assert torch.equal(grad, torch.cat([grads[i][r] for i in range(world)]))
        y, grad = got[r]["all_gather"]
        assert torch.equal(y, everything)
        assert torch.equal(grad, copies[r])
        y, grad = got[r]["reduce_scatter"]
        assert torch.equal(y, total[r])
        assert torch.equal(grad, shares)
        away = (sum(sends[r]) - sends[r][r]) + (sum(s[r] for s in sends) - sends[r][r])
        assert got[r]["bytes"]["all_to_all_rows"] == away * row
        assert got[r]["bytes"]["all_gather_rows"] == 2 * sizes[r] * (world - 1) * row
        assert got[r]["bytes"]["reduce_scatter_rows"] == 2 * (sum(sizes) - sizes[r]) * row


def no_rows_at_all(rank, cache, world):
    axis = world_axis(rank, cache, world)
    comms = Collectives(timeout_s=20)
    x = torch.zeros(0, 5, requires_grad=True)
    zero = [0] * world
    y = comms.all_to_all_rows(x, in_splits=zero, out_splits=zero, axis=axis)
    z = comms.reduce_scatter_rows(comms.all_gather_rows(y, sizes=zero, axis=axis), sizes=zero, axis=axis)
    z.sum().backward()
    return tuple(z.shape), tuple(x.grad.shape)


def summed_beside_another_use(rank, cache):
    """What is added up, its sum, and gradients: autograd gives the gradient of a sum of two terms to both, as one tensor."""
    axis, comms = world_axis(rank, cache, 2), Collectives(timeout_s=20)
    x, z = (torch.full((3,), v, requires_grad=True) for v in (rank + 1.0, 0.0))
    own, other = x * 1.0, z * 1.0
    y = comms.all_reduce_sum(own, axis)
    ((y + other) * torch.tensor([1.0, 2.0, 3.0 + rank])).sum().backward()
    return own.detach(), y.detach(), x.grad, z.grad


def test_a_sum_leaves_its_terms_and_their_gradients_as_they_are():
    for rank, (own, y, dx, dz) in enumerate(run_ranks(2, summed_beside_another_use)):
        assert own.tolist() == [rank + 1.0] * 3 and y.tolist() == [3.0] * 3
        assert dx.tolist() == [2.0, 4.0, 7.0] and dz.tolist() == [1.0, 2.0, 3.0 + rank]


def test_no_rows_at_all():
    assert run_ranks(3, no_rows_at_all, 3) == [((0, 5), (0, 5))] * 3


def events_of(rank, cache, world):
    seen = []
    comms = Collectives(emit=seen.append, timeout_s=20)
    axis = world_axis(rank, cache, world, "edp")
    comms.all_reduce(torch.zeros(3), axis, op_id="step.quiet")
    comms.trace = True
    x = torch.ones(world, 4, requires_grad=True)
    ones = [1] * world
    y = comms.all_to_all_rows(x, in_splits=ones, out_splits=ones, axis=axis, op_id="mb0.L1.fwd.dispatch.rows")
    y.sum().backward()
    return seen


def test_events():
    for events in run_ranks(2, events_of, 2):
        assert all(isinstance(e, Collective) for e in events)
        ids = [(e.op_id, e.op, e.axis, e.size, e.sent_bytes) for e in events]
        assert ids == [
            ("mb0.L1.fwd.dispatch.rows", "all_to_all_rows", "edp", 2, 16),
            ("mb0.L1.bwd.dispatch.rows", "all_to_all_rows", "edp", 2, 16),
        ]
        assert all(e.end_s >= e.begin_s > 0 for e in events)


def test_backward_id():
    assert backward_id("mb0.L3.fwd.dispatch.rows") == "mb0.L3.bwd.dispatch.rows"
    assert backward_id("norm") == "norm.bwd"
    assert backward_id("") == ""


def test_one_rank_needs_no_world():
    groups = build_groups(make_folding(world=1), rank=0, cache=GroupCache())
    comms = Collectives()
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    for name in GROUP_AXES:
        axis = groups.axis(name)
        assert (axis.size, axis.index, axis.group) == (1, 0, None)
        assert comms.all_reduce(x, axis) is x
        assert comms.reduce_scatter(x, axis) is x
        assert comms.all_gather(x, axis) is x
        assert comms.broadcast(x, axis) is x
        assert comms.all_to_all_rows(x, in_splits=[3], out_splits=[3], axis=axis) is x
        assert comms.all_gather_rows(x, sizes=[3], axis=axis) is x
        assert comms.reduce_scatter_rows(x, sizes=[3], axis=axis) is x
        assert comms.gather_objects("a", axis) == ["a"]
        comms.barrier(axis)
    out = torch.empty(3, 2)
    assert comms.all_gather(x.detach(), axis, out=out) is out
    assert torch.equal(out, x)
    assert comms.counters == {}


def test_wrong_sizes_are_refused_before_anything_is_sent():
    axis = Axis("ep", (0, 1), 0, object())
    comms = Collectives()
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="do not divide 3 rows"):
        comms.all_to_all_rows(x, in_splits=[1, 1], out_splits=[1, 1], axis=axis)
    with pytest.raises(ValueError, match="do not divide 3 rows"):
        comms.reduce_scatter_rows(x, sizes=[4, -1], axis=axis)
    with pytest.raises(ValueError, match="another number of rows than its 3"):
        comms.all_gather_rows(x, sizes=[2, 2], axis=axis)
    with pytest.raises(ValueError, match="do not split into 2"):
        comms.reduce_scatter(torch.zeros(3), axis)
    with pytest.raises(ValueError, match="cannot take 2 x 6"):
        comms.all_gather(x, axis, out=torch.zeros(3))


def disagreeing(rank, cache, expected):
    axis = world_axis(rank, cache, 2, "ep")
    comms = Collectives(timeout_s=20, check_splits=True)
    try:
        comms.all_to_all_rows(torch.zeros(4, 1), in_splits=[2, 2], out_splits=[2, 2 if rank else expected], axis=axis)
    except RunError as err:
        return str(err)
    return ""


@pytest.mark.parametrize("expected", [1, 3])
def test_splits_that_disagree_are_named(expected):
    for text in run_ranks(2, disagreeing, expected):
        assert f"all_to_all_rows over ep (0, 1): rank 1 sends 2 rows to rank 0, which expects {expected}" in text


def by_column(rank, cache, op):
    """Of what lies column by column: reduced with checked messages, with how many were sent and came; and what another rank has sent."""
    axis, sums = world_axis(rank, cache, 2), MessageSums(rank)
    x = torch.arange(42.0).view(6, 7).T * (1 - 2 * rank)
    Collectives(timeout_s=20, sums=sums).all_reduce(x, axis, op=op)
    _, sent, received = sums.take()
    rows = torch.arange(8.0).view(2, 4).T + 10 * rank
    came = Collectives(timeout_s=20).all_to_all_rows(rows, in_splits=[2, 2], out_splits=[2, 2], axis=axis)
    return x, len(sent), len(received), came


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_checked_messages_reduce_what_they_should_and_each_is_checked(op):
    x = torch.arange(42.0).view(6, 7).T
    want = {"sum": x * 0, "max": x, "min": -x}[op]
    rows = torch.arange(8.0).view(2, 4).T
    for rank, (found, sent, received, came) in enumerate(run_ranks(2, by_column, op)):
        assert torch.equal(found, want) and sent == received == 2  # its part of the sum, and what it made of it
        assert torch.equal(came, torch.cat([rows[2 * rank : 2 * rank + 2] + 10 * other for other in range(2)]))


def lonely(rank, cache):
    axis = world_axis(rank, cache, 2, "edp")
    comms = Collectives(timeout_s=1.0)
    if rank == 1:
        time.sleep(2.5)
        return ""
    try:
        comms.all_reduce(torch.zeros(2), axis, op_id="step3.reduce.expert")
    except RunError as err:
        return str(err)
    return "no error"


@pytest.mark.core
def test_timeout_names_op_axis_and_ranks():
    def body(rank, cache):  # a closure: its own pool, since the group is useless afterwards
        return lonely(rank, cache)

    text = run_ranks(2, body)[0]
    assert "all_reduce [step3.reduce.expert] over axis edp, ranks (0, 1), failed on rank 0" in text
    assert "no answer within 1 s" in text


@pytest.mark.core
def test_a_dead_rank_is_a_run_error_on_the_others():
    def body(rank, cache):
        axis = world_axis(rank, cache, 3, "ep")
        comms = Collectives(timeout_s=20)
        comms.barrier(axis)
        if rank == 2:
            os._exit(7)
        n = [1, 1, 1]
        comms.all_to_all_rows(torch.zeros(3, 2), in_splits=n, out_splits=n, axis=axis)

    with pytest.raises(RankError) as info:
        run_ranks(3, body)
    assert "the process died (exit code 7)" in str(info.value)
    assert isinstance(info.value.causes[0], RunError)
    assert "all_to_all_rows over axis ep, ranks (0, 1, 2), failed on rank 0: a rank left or failed" in str(info.value)


# ---- groups ------------------------------------------------------------------------------------------------------------


def members(rank, cache, foldings):
    comms = Collectives(timeout_s=20)
    out = []
    for folding in foldings:
        groups = build_groups(folding, rank=rank, cache=cache)
        codes = {}
        for name, axis in groups.axes.items():
            assert axis.ranks == folding.group_of(rank, name)
            assert axis.ranks[axis.index] == rank
            codes[name] = int(comms.all_reduce(torch.tensor([2**rank]), axis))
        out.append(codes)
    return out, len(cache)


def test_every_group_has_the_ranks_of_the_plan():
    foldings = [
        make_folding(world=4, tp=t, cp=c, pp=p, ep=e, etp=x)
        for t, c, p, e, x in itertools.product((1, 2, 4), repeat=5)
        if 4 % (t * c * p) == 0 and 4 % (e * x * p) == 0
    ]
    results = run_ranks(4, members, foldings)
    for rank, (codes, _) in enumerate(results):
        for folding, of in zip(foldings, codes, strict=True):
            assert of == {n: sum(2**r for r in folding.group_of(rank, n)) for n in of} and set(of) >= set(GROUP_AXES)
    again = run_ranks(4, members, foldings)
    assert [n for _, n in again] == [n for _, n in results]  # all from the cache


def test_a_group_without_a_world_is_explained():
    with pytest.raises(RunError, match=r"group \(0 1\) needs 2 ranks, but this process runs alone"):
        GroupCache().get((0, 1))


def test_read_world():
    assert read_world({}) is None
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "7",
    }
    want = WorldInfo(rank=3, world=4, local_rank=1, local_world=2, master_addr="h", master_port=7)
    assert read_world(env) == want
    assert read_world({"RANK": "1", "WORLD_SIZE": "2"}).local_rank == 1


def test_ranks_of_one_machine_meet_where_their_user_alone_can_reach():
    """By file and not by port, whoever started them. What a first rank that has ended left there is passed over."""
    pid = os.fork()
    if pid == 0:
        meeting.meeting_file(0, 70_000, timeout_s=1.0)
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(RuntimeError, match=r"rank 0 has not come to .*ranks-at-70000"):
        meeting.meeting_file(1, 70_000, timeout_s=0.1)
    file = meeting.meeting_file(0, 70_000, timeout_s=1.0)
    assert meeting.meeting_file(1, 70_000, timeout_s=1.0) == file
    assert file.parent.stat().st_mode & 0o777 == 0o700 and file.name.startswith("ranks-at-70000-")
    if (pid := os.fork()) == 0:  # another first rank at the same port, while this one runs
        with pytest.raises(RuntimeError, match="EADDRINUSE"):
            meeting.meeting_file(0, 70_000, timeout_s=1.0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_ranks_of_several_machines_listen_at_one_address(monkeypatch):
    there = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    assert meeting.listen_at("127.0.0.1", 0) is None
    assert meeting.listen_at("host.invalid", 0) is None
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*there[0][:4], ("0.0.0.0", 0))])
    with socket.socket(fileno=meeting.listen_at("node0", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*there[0][:4], ("0.0.0.0", port))])
        with pytest.raises(RuntimeError, match="EADDRINUSE"):
            meeting.listen_at("node0", port)


def test_ranks_of_several_machines_meet_where_torchrun_listens(monkeypatch, capfd):
    """None of them listens itself, and gloo takes the interface towards the first machine. The agent outlives ranks that it starts again (`--max-restarts`), with what they left in its store."""
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for start in range(2):
        pids = []
        for rank in range(2):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    time.sleep(start and 0.5 * (1 - rank))  # the other one finds what the first start has left
                    init_world(read_world({**env, "RANK": str(rank)}), timeout_s=60)
                    x = torch.full((1,), float(rank + 1))
                    torch.distributed.all_reduce(x)
                    code = 0 if x == 3 and os.environ["GLOO_SOCKET_IFNAME"] == "lo" else 2
                finally:
                    os._exit(code)
            pids.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0], f"start {start}"
    assert "[E" not in capfd.readouterr().err


def sharing(rank, cache, cards, hosts=None):
    if hosts is not None:
        os.environ["NCCL_HOSTID"] = hosts[rank]
    try:
        return [str(p) for p in world._sharing_problems(cards[rank], len(cards))]
    finally:
        os.environ.pop("NCCL_HOSTID", None)


def test_no_two_ranks_have_one_gpu():
    assert run_ranks(3, sharing, ["a", "b", "c"]) == [[], [], []]
    first, other, last = run_ranks(3, sharing, ["a", "b", "a"])
    assert "GPU = 'a': is the GPU of ranks 0, 2, and each needs one of its own" in first[0]
    assert first == last and other == []


def test_ranks_that_say_they_are_hosts_of_their_own_may_share_a_gpu():
    """As NCCL has it; `phalanx gpu-check` runs so."""
    assert run_ranks(2, sharing, ["a", "a"], ["rank-0", "rank-1"]) == [[], []]
    assert all(run_ranks(2, sharing, ["a", "a"], ["node", "node"]))


@pytest.mark.parametrize("cards", ["ab", "aa"])
def test_ranks_that_see_one_gpu_each_join_where_it_is_another_one(tmp_path, monkeypatch, cards):
    """SLURM's --gpus-per-task=1 makes it device 0 of each process, and so does a CUDA_VISIBLE_DEVICES that all have by mistake."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0"}
    join, pids = torch.distributed.init_process_group, []
    monkeypatch.setattr(world.dist, "init_process_group", lambda backend, **words: join("gloo", **words))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world, "_grow_segments", lambda device: None)
    for rank in range(2):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                torch.cuda.get_device_properties = lambda device, card=cards[rank]: SimpleNamespace(uuid=card)
                info = read_world({**env, "RANK": str(rank)})
                assert info is not None
                info = replace(info, meeting=tmp_path / "meeting")
                code = 0 if init_world(info, device="cuda", timeout_s=60) == torch.device("cuda", 0) else 2
                if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":  # or fused layers were refused
                    code = 5
            except ConfigError as err:
                code = 3 if "is the GPU of ranks 0, 1" in str(err) else 4
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == ([0, 0] if cards == "ab" else [3, 3])


def test_read_world_names_every_problem():
    with pytest.raises(ConfigError) as info:
        read_world({"RANK": "x", "MASTER_PORT": "-1"})
    assert [p.where for p in info.value.problems] == ["RANK", "WORLD_SIZE", "MASTER_PORT"]
    with pytest.raises(ConfigError, match="RANK = 4: must lie between 0 and WORLD_SIZE - 1 = 3"):
        read_world({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="LOCAL_RANK = 2"):
        read_world({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"})
    for port in ("0", "65536"):
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: must lie between 1 and 65535"):
            read_world({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port})
    assert read_world({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65535"}).master_port == 65535


def test_port_in_use_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"MASTER_PORT = {port}: the port is in use"):
            init_world(WorldInfo(world=2, local_world=1, master_port=port), timeout_s=3)


@pytest.mark.parametrize(
    ("num_gpus", "text"),
    [
        (0, "launch.device = 'cuda': needs a GPU that torch can use, and finds none on this machine; use cpu"),
        (1, r"launch.ranks = 2: must be at most the GPUs of this machine \(1\), one for each rank; use 1"),
    ],
)
def test_missing_gpus_are_named(num_gpus, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=text):
        init_world(WorldInfo(world=2, local_world=2), device="cuda", timeout_s=3)


def test_absent_ranks_are_named():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(RunError, match=r"rank 0 of 2 could not meet the others at 127.0.0.1:\d+ within 1 s"):
        init_world(WorldInfo(world=2, local_world=2, master_port=port), timeout_s=1)


# ---- the pool itself ---------------------------------------------------------------------------------------------------


def failing(rank, cache):
    if rank == 1:
        raise KeyError("boom")
    return rank


def hanging(rank, cache):
    if rank == 1:
        time.sleep(60)
    return rank


def test_pool_reports_the_rank_that_failed():
    with pytest.raises(RankError) as info:
        run_ranks(2, failing)
    assert isinstance(info.value.causes[1], KeyError)
    assert "--- rank 1 ---" in str(info.value) and 'raise KeyError("boom")' in str(info.value)


def test_pool_watchdog_shows_stacks():
    with pytest.raises(RankTimeout) as info:
        run_ranks(2, hanging, timeout_s=1)
    assert "ranks [1] did not finish within 1 s" in str(info.value)
    assert "in hanging" in str(info.value)


def test_pool_is_reused_and_serves_closures():
    first, second = run_ranks(2, pid), run_ranks(2, pid)
    assert first == second and len(set(first)) == 2
    base = 10
    assert run_ranks(2, lambda rank, cache: base + rank) == [10, 11]


def pid(rank, cache):
    return os.getpid()


def test_counter_is_plain():
    assert Counter() == Counter(calls=0, sent_bytes=0)


# ---- one collective, without ranks


TWO = Axis("ep", (4, 6), 0, None)


@pytest.mark.parametrize("splits", [(3,), (1, 1, 1), (1, 1), (2, 2), (4, -1)])
def test_splits_that_are_no_shares_of_the_rows_are_refused_before_anything_is_sent(splits):
    check_splits_of(torch.zeros(3, 2), (1, 2), TWO, "all_to_all_rows")
    with pytest.raises(ValueError, match="do not divide 3 rows among 2 ranks"):
        check_splits_of(torch.zeros(3, 2), splits, TWO, "all_to_all_rows")


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (3, 1, 1)])
def test_sizes_that_give_a_rank_other_rows_are_refused_before_anything_is_sent(sizes):
    check_own(torch.zeros(3, 2), (3, 1), TWO)
    with pytest.raises(ValueError, match="give rank 0 of 2 another number of rows than its 3"):
        check_own(torch.zeros(3, 2), sizes, TWO)


def test_truths_are_carried_and_not_summed():
    with pytest.raises(ValueError, match=r"all_reduce over ep: reduction is not supported for torch\.bool"):
        check_summed(torch.zeros(2, dtype=torch.bool), TWO, "all_reduce")
    check_summed(torch.zeros(2, dtype=torch.uint8), TWO, "all_reduce")


@pytest.mark.parametrize(("text", "is_one"), [("connection reset by peer", True), ("no route to host", True), ("network is unreachable", True), ("broken pipe", True), ("out of memory", False)])  # fmt: skip
def test_an_error_about_the_other_end_is_told_from_others(text, is_one):
    assert is_departure(text) is is_one


def test_an_exchange_is_there_once_it_was_waited_for_and_finishes_once():
    done = []
    exchange = Exchange(lambda: done.append("finish"), again=lambda: done.append("again"))
    assert not exchange.is_there
    exchange.wait()
    assert exchange.is_there
    exchange.wait()
    assert done == ["finish", "again"]
    assert Exchange(lambda: None, poll=lambda: True).is_there


def test_messages_that_are_waited_for_together_are_there_with_the_last_of_them():
    works = [SimpleNamespace(is_completed=lambda i=i: i in there) for i in range(2)]
    there = {0}
    assert not _Several(works).is_completed()
    there.add(1)
    assert _Several(works).is_completed() and _Several([]).is_completed()
