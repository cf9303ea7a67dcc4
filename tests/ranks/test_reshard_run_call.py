"""`phalanx.reshard`: DTensors of different meshes, meshes with placements, states, and what is refused."""

from __future__ import annotations

import pytest
import torch
from reshard_help import equal_hosts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import phalanx
from phalanx.core.errors import ConfigError, PeerError, PhalanxError, PlanError
from phalanx.plan.layout.mesh.placements import Partial as Sum, mesh_layout
from phalanx.plan.layout.tensors import whole_layout
from phalanx.runtime.reshard.call import ONE
from phalanx.runtime.reshard.dtensor import layout_of, layout_of_dtensor
from ranks import run_ranks

pytestmark = pytest.mark.ranks
WORLD = 8
HOSTS = equal_hosts([0, 0, 0, 0, 1, 1, 1, 1])
PAIRS = [  # shape, ranks and placements of the source, and of the destination
    ((13, 7), [[0, 1], [2, 3]], [Shard(0), Shard(1)], [[4, 5, 6, 7]], [Replicate(), Shard(0)]),
    ((13, 7), [[0, 1], [2, 3]], [Shard(0), Shard(0)], [[4, 5, 6, 7]], [Replicate(), Shard(1)]),
    ((8, 6), [[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(0)], [4, 5, 6], [Shard(0)]),
    ((12, 5), [[0, 1], [2, 3]], [Replicate(), Shard(-1)], [0, 1, 2, 3, 4, 5, 6, 7], [Shard(0)]),
    ((16,), [0, 1, 2, 3, 4], [Shard(0)], [[7, 3], [5, 1]], [Shard(0), Shard(0)]),
    ((9, 4, 3), [6, 2], [Shard(2)], [0, 1, 2], [Shard(0)]),
    ((3, 10), [0, 1, 2, 3], [Shard(0)], [3, 2, 1, 0], [Shard(0)]),  # the same mesh; one rank holds nothing
]


def mesh_of(ranks, made={}):  # noqa: B006 - of one rank: torch makes groups for every mesh
    key = str(ranks)
    if key not in made:
        made[key] = DeviceMesh("cpu", torch.tensor(ranks))
    return made[key]


def full(shape, dtype=torch.float32):
    n = torch.arange(torch.Size(shape).numel()).view(shape)
    return (n * 3 + 1).to(dtype)


def by_coordinates(x, ranks, placements):
    """Cut locally. (Torch's own scatter, like its gather, goes by sorted ranks, so on a mesh in another order it disagrees with its coordinates.)"""
    return distribute_tensor(x, mesh_of(ranks), placements, src_data_rank=None)


def dtensor_pairs(rank, cache):
    resharder = phalanx.open_resharder(hosts=HOSTS, timeout_s=20)
    for shape, a, src, b, dst in PAIRS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            x = by_coordinates(full(shape, dtype), a, src)
            before = x.to_local().clone()
            want = by_coordinates(full(shape, dtype), b, dst)
            got = phalanx.reshard(x, None, (mesh_of(b), dst), resharder=resharder)
            assert isinstance(got, DTensor) and got.device_mesh == mesh_of(b), shape
            assert tuple(got.placements) == tuple(want.placements) and got.shape == want.shape
            assert got.dtype == dtype and torch.equal(got.to_local(), want.to_local()), (shape, src, dst, dtype)
            assert torch.equal(x.to_local(), before)
            ranks = mesh_of(b).mesh.flatten().tolist()
            if rank in ranks and ranks == sorted(ranks):
                assert torch.equal(got.full_tensor(), full(shape, dtype))


def test_dtensors_move_between_meshes():
    run_ranks(WORLD, dtensor_pairs)


def partial_dtensor(rank, cache):
    mesh, target = mesh_of([[0, 1, 2], [3, 4, 5]]), mesh_of([6, 7, 0])
    local = full((6, 5)) * (rank + 1) if rank < 6 else torch.empty(0)
    x = DTensor.from_local(
        local, mesh, [Shard(0), Partial()], run_check=False, shape=torch.Size((12, 5)), stride=(5, 1)
    )
    got = phalanx.reshard(x, None, (target, [Shard(1)]), resharder=phalanx.open_resharder(hosts=HOSTS, timeout_s=20))
    want = torch.cat([full((6, 5)) * 6, full((6, 5)) * 15])
    if rank in (6, 7, 0):
        assert torch.equal(got.to_local(), want.chunk(3, 1)[[6, 7, 0].index(rank)])
    return layout_of_dtensor(x).terms


def test_a_partial_dtensor_is_added_up_on_the_way():
    assert set(run_ranks(WORLD, partial_dtensor)) == {(0, 1, 2, 0, 1, 2)}


def states(rank, cache):
    """A dict of DTensors and a dict of plain tensors, in one call each; hosts asked for by name."""
    a, b = mesh_of([[0, 1], [2, 3]]), mesh_of([4, 5, 6, 7])
    state = {"w": full((8, 8)), "b": full((5,), torch.float64)}
    x = {n: distribute_tensor(t, a, [Shard(0), Replicate()]) for n, t in state.items()}
    got = phalanx.reshard(x, None, {"w": (b, [Shard(1)]), "b": (b, [Replicate()])})
    assert torch.equal(got["w"].to_local(), distribute_tensor(state["w"], b, [Shard(1)]).to_local())
    assert torch.equal(got["b"].to_local(), distribute_tensor(state["b"], b, [Replicate()]).to_local())
    src = {n: whole_layout(t.shape, [1]) for n, t in state.items()}
    out = {n: torch.zeros_like(t) for n, t in state.items()} if rank == 6 else None
    plain = phalanx.reshard(
        state if rank == 1 else None,
        src,
        {n: whole_layout(t.shape, [6]) for n, t in state.items()},
        dtype={n: t.dtype for n, t in state.items()},
        out=out,
    )
    assert sorted(plain) == ["b", "w"]
    assert all((plain[n] is None) == (rank != 6) for n in state)
    if rank == 6:
        assert all(plain[n].data_ptr() == out[n].data_ptr() and torch.equal(plain[n], state[n]) for n in state)


@pytest.mark.core
def test_states_move_by_one_plan():
    run_ranks(WORLD, states)


def plain_meshes(rank, cache):
    """The arguments of an M-to-N cast: local tensors, meshes and placements on both sides."""
    a, b = mesh_of([0, 1, 2]), mesh_of([[2, 3], [4, 5]])
    x = full((7, 4))
    local = x.chunk(3)[rank].clone().requires_grad_(True) if rank < 3 else None
    got = phalanx.reshard(
        local,
        (a, [Shard(0)]),
        (b, [Shard(1), Replicate()]),
        shape=(7, 4),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert got is None or (torch.equal(got, x.chunk(2, 1)[(rank - 2) // 2]) and not got.requires_grad)
    assert (got is None) == (rank not in (2, 3, 4, 5))


def test_meshes_and_placements_of_plain_tensors():
    run_ranks(WORLD, plain_meshes)


def refused(rank, cache, what):
    a = mesh_of([0, 1])
    x = torch.zeros(4, 4)
    try:
        if what == "shape":
            phalanx.reshard(x, (a, [Shard(0)]), (a, [Replicate()]))
        elif what == "no layout":
            phalanx.reshard(x, None, whole_layout((4, 4), [0]))
        elif what == "dtype":
            phalanx.reshard(x if rank == 0 else None, whole_layout((4, 4), [0]), whole_layout((4, 4), [1]))
        elif what == "names":
            phalanx.reshard({"a": x, "b": x}, {"a": whole_layout((4, 4), [0])}, {"a": whole_layout((4, 4), [0])})
        elif what in ("another dtype", "another shape"):
            more = {"dtype": torch.bfloat16} if what == "another dtype" else {"shape": (7,)}
            phalanx.reshard(x, whole_layout((4, 4), [0, 1]), whole_layout((4, 4), [0, 1]), **more)
        elif what == "lost":
            phalanx.reshard({"a": x}, {"a": layout_of((8, 4), a, [Shard(0)])}, {"a": whole_layout((9, 4), [0])})
    except PhalanxError as err:
        return type(err), str(err)
    return None


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("shape", "tensor.src_layout: a mesh and placements do not say how large the whole tensor is; give shape="),
        (
            "no layout",
            "tensor.src_layout: only a DTensor brings a layout of its own; give a TensorLayout, or a DeviceMesh",
        ),
        ("dtype", "tensor.dtype: rank 1 has no tensor that shows the type of the elements; give dtype="),
        ("names", "src_layout['b']: is missing; give each name a layout on both sides"),
        ("another dtype", "tensor.dtype = torch.bfloat16: must be that of the tensor, torch.float32: a move converts"),
        ("another shape", "tensor.shape = (7,): must be that of the layout, (4, 4); leave shape= out"),
        ("lost", "must be"),
    ],
)
def test_what_is_refused_is_told_by_all(what, text):
    told = run_ranks(2, refused, what)
    assert any(kind is PlanError and text in said for kind, said in told), told
    assert all(kind in (PlanError, PeerError) for kind, _ in told)


class FakeMesh:
    def __init__(self, ranks):
        self.mesh = torch.tensor(ranks)


@pytest.mark.parametrize(
    ("placement", "text"),
    [(Partial("max"), "only sums can be completed on the way, not 'max'"), (Partial("avg"), "not 'avg'"),
     (_MaskPartial("sum", offset_shape=torch.Size([4]), offset_dim=0), "only sums can be completed on the way"),
     ("nonsense", "cannot be expressed as boxes of the tensor")],
)  # fmt: skip
def test_other_placements_are_named(placement, text):
    with pytest.raises(PlanError) as info:
        layout_of((4, 4), FakeMesh([0, 1]), [placement], where="x")
    assert (
        text in str(info.value) and "x.placements[0]" in str(info.value) and "use Shard, Replicate" in str(info.value)
    )


def test_placements_are_a_list():
    with pytest.raises(PlanError, match=r"x.placements = Shard\(dim=1\): must be a list.*use \[S\(1\)\]"):
        layout_of((4, 4), FakeMesh([0, 1]), Shard(1), where="x")


def test_a_resharder_is_opened_with_what_it_can_use():
    for words, text in (
        ({"group": 3}, "group = 3: must be a process group or None"),
        ({"hosts": [0, 1, 2]}, r"hosts = \[0, 1, 2\]: must be phalanx.plan.reshard.Hosts or None; leave it out"),
        ({"options": {"x": 1}}, "options = {'x': 1}: must be phalanx.runtime.reshard.PlanOptions or None"),
        ({"timeout_s": -1}, "timeout_s = -1: must be a number above 0; use 20"),
        ({"timeout_s": "5"}, "timeout_s = '5': must be a number above 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            phalanx.open_resharder(**words)


def test_alone_without_a_process_group():
    x = full((4, 4))
    got = phalanx.reshard(x, whole_layout((4, 4), [0]), whole_layout((4, 4), [0]))
    assert torch.equal(got, x) and got.data_ptr() != x.data_ptr()
    assert ONE == "tensor"


def odd_calls(rank, cache):
    resharder = phalanx.open_resharder(hosts=HOSTS, timeout_s=20)
    src, dst = whole_layout((3, 4), [0]), whole_layout((3, 4), [0, 3])
    x = torch.arange(12.0).view(3, 4)
    mine = x if rank == 0 else None

    def said(**words):
        given = words.pop("given", mine)
        with pytest.raises(PhalanxError) as error:
            phalanx.reshard(given, words.pop("src", src), dst, resharder=resharder, **words)
        return str(error.value)

    # bits of one type are no numbers of another of the same size
    assert "types" in said(dtype=torch.float32 if rank == 0 else torch.int32)
    out = torch.zeros(3, 1).expand(3, 4) if rank in (0, 3) else None
    text = said(dtype=torch.float32, out=out)
    assert ("one place in memory" in text) == (rank in (0, 3)) and ("[0, 3] refused" in text) == (rank not in (0, 3))
    text = said(given=[1, 2] if rank == 5 else mine, dtype=torch.float32)  # one rank alone: nobody waits for it
    assert ("neither a tensor nor a dict" in text) == (rank == 5) and ("[5] refused" in text) == (rank != 5)
    assert "is no layout" in said(src="2 S0", dtype=torch.float32)
    parts = mesh_layout((3, 4), (2,), [Sum()], ranks=[0, 1])
    terms = torch.ones(3, 4, dtype=torch.uint16) if rank < 2 else None
    assert "cannot be added up" in said(given=terms, src=parts, dtype=torch.uint16)
    got = phalanx.reshard(mine, src, dst, dtype=torch.float32, resharder=resharder)
    assert got is None or torch.equal(got, x)


def test_odd_calls_are_refused_before_anything_travels():
    run_ranks(WORLD, odd_calls)


def awkward_tensors(rank, cache):
    """One element of any stride, alone in a message; conjugate ones; a DTensor of no dims."""
    resharder = phalanx.open_resharder(hosts=HOSTS, timeout_s=20)
    src, dst = whole_layout((1, 1), [0]), whole_layout((1, 1), [5])
    x = torch.arange(9.0).as_strided((1, 1), (5, 7), 3)
    assert x.is_contiguous() and x.stride() == (5, 7)
    out = torch.zeros(9).as_strided((1, 1), (7, 5), 2)
    got = phalanx.reshard(
        x if rank == 0 else None, src, dst, dtype=torch.float32, out=out if rank == 5 else None, resharder=resharder
    )
    assert (got is None) == (rank != 5) and (rank != 5 or got.item() == out.item() == 3)
    with torch.inference_mode():
        kept = torch.zeros(4, 3).T
    got = phalanx.reshard(
        torch.arange(12.0).view(3, 4).requires_grad_() if rank == 0 else None, whole_layout((3, 4), [0]),
        whole_layout((3, 4), [0, 5]), dtype=torch.float32, out=kept if rank in (0, 5) else None, resharder=resharder,
    )  # fmt: skip
    assert got is None or torch.equal(got, torch.arange(12.0).view(3, 4))
    z = torch.tensor([1 + 2j, 3 - 4j]).conj()
    got = phalanx.reshard(
        z if rank == 0 else None, whole_layout((2,), [0]), whole_layout((2,), [7]), dtype=z.dtype, resharder=resharder
    )
    assert rank != 7 or got.tolist() == [1 - 2j, 3 + 4j]
    a, b = mesh_of([0, 1]), mesh_of([2, 3])
    one = DTensor.from_local(torch.tensor(7.0), a, [Replicate()], run_check=False)
    if rank >= 2:
        one = distribute_tensor(torch.tensor(7.0), a, [Replicate()], src_data_rank=None)
    got = phalanx.reshard(one, None, (b, [Replicate()]), resharder=resharder)
    assert got.shape == () and (rank not in (2, 3) or got.to_local().item() == 7)


def test_tensors_that_lie_awkwardly_arrive():
    run_ranks(WORLD, awkward_tensors)


def bad_places(rank, cache):
    resharder = phalanx.open_resharder(hosts=HOSTS, timeout_s=20)
    src, dst = whole_layout((3, 4), [0]), whole_layout((3, 4), [0, 3])
    x = torch.arange(12.0).view(3, 4)
    mine = x if rank == 0 else None

    def said(given, out):
        out = out if rank in (0, 3) else None
        with pytest.raises(PhalanxError) as error:
            phalanx.reshard(given, src, dst, dtype=torch.float32, out=out, resharder=resharder)
        return str(error.value)

    fresh = torch.zeros(3, 4)
    assert (
        "tensor of out = (3, 4): shares memory with tensor of the source" in said(mine, x if rank == 0 else fresh)
        or rank
    )
    assert "one place in memory" in said(mine, torch.zeros(20).as_strided((3, 4), (1, 1))) or rank not in (0, 3)
    assert "must be a dense tensor" in said(x.to_sparse() if rank == 0 else None, fresh) or rank
    assert "must be a dense tensor" in said(x.to("meta") if rank == 0 else None, fresh) or rank
    assert "is not a tensor" in said({"tensor": [1.0]} if rank == 0 else {"tensor": None}, None) or rank
    room = torch.zeros(3, 8)
    room[:, :4] = x
    beside = room[:, 4:] if rank == 0 else fresh  # in one piece of memory with the source, and nowhere the same
    got = phalanx.reshard(
        room[:, :4] if rank == 0 else None, src, dst, dtype=torch.float32,
        out=beside if rank in (0, 3) else None, resharder=resharder,
    )  # fmt: skip
    assert got is None or torch.equal(got, x)


def test_places_that_cannot_be_written_are_refused_by_all():
    run_ranks(WORLD, bad_places)


def broken_delivery(rank, cache):
    layout = {"w": whole_layout((4,), [0])}, {"w": whole_layout((4,), [3])}
    sync = phalanx.WeightSync(
        phalanx.open_resharder(hosts=HOSTS, timeout_s=20), src=layout[0], dst=layout[1], dtypes={"w": torch.float32}
    )
    with pytest.raises(PlanError if rank == 0 else PeerError, match="dense tensor" if rank == 0 else "refused"):
        sync.deliver({"w": "a word"} if rank == 0 else {})
    with pytest.raises(AttributeError if rank == 0 else PeerError):
        sync.deliver(None if rank == 0 else {})
    got = sync.deliver({"w": torch.ones(4)} if rank == 0 else {})
    assert rank != 3 or got["w"].tolist() == [1] * 4


def test_a_delivery_that_fails_on_one_rank_keeps_nobody_waiting():
    run_ranks(WORLD, broken_delivery)
