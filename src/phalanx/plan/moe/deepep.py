"""What DeepEP carries: whole tokens, once to each rank that has an expert of theirs (`dispatch.transport = "deepep"`; github.com/deepseek-ai/DeepEP, class `Buffer`).

Decides where a recipe may ask for it, and says what memory it takes. Limits are those that its kernels assert, most on the device, where a broken one ends the process (`csrc/kernels/legacy`
of version 2.1): so they are named here, before anything runs. Up to 8 ranks are one host's and write into each other's memory; more are hosts of 8, which also needs NVSHMEM. So the number of
ranks alone says whether a group spans hosts (`num_rdma_ranks` in the constructor of `csrc/legacy/buffer.hpp`), and a host's 8 ranks may have as many experts as a block has threads:
512 between hosts (internode.cu, `notify_dispatch`: `num_rdma_experts <= num_threads`), while within a host each rank may have 128 (intranode.cu, the launch of `notify_dispatch`).
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.config import Recipe
from phalanx.core.errors import Problem
from phalanx.plan.model import ModelSpec

SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Ranks of a group for which it has settings."""
HOST_RANKS = 8
MOST_EXPERTS = {False: 128, True: 64}
"""Between hosts or not -> the experts that a rank may have."""
MOST_CHOICES = 32
WIDTHS = {False: (16, 8176), True: (256, 7936)}
"""Between hosts or not -> what divides the width of a token, and the most that it may be: a half, or the whole, with a flag in a warp's 8 or 16 KiB."""
CHANNELS = 10
QUEUED = {16: (288, 140), 96: (480, 132), 128: (560, 132), 144: (720, 132), 160: (720, 132)}
"""Ranks -> tokens that wait in each channel for each rank of a host, and for each host; where it is not said (288, 128), and (256, 0) within a host."""
TOKEN_EXTRAS = 8 + 128 * (8 + 4 + 4)
"""Bytes beside a token: its source, and room for 128 choices, weights and scales."""
PLAIN = '"all_to_all"'


def deepep_bytes(*, ranks: int, hidden: int) -> int:
    """What its buffers take of a device, outside torch's allocator, for a group of `ranks` (`get_nvl_buffer_size_hint` and its neighbour, but for flags)."""
    here, between = QUEUED.get(ranks, (288, 128)) if ranks > HOST_RANKS else (256, 0)
    token = 2 * hidden + TOKEN_EXTRAS
    return CHANNELS * (min(ranks, HOST_RANKS) * here * token + ranks // HOST_RANKS * between * 2 * (token + 16))


def _problem(rule: str, hint: str) -> Problem:
    return Problem(where="dispatch.transport", value="deepep", rule=rule, hint=f"{hint}, or {PLAIN}" if hint else PLAIN)


def transport_problems(recipe: Recipe, spec: ModelSpec, *, groups: Sequence[tuple[int, int, int]]) -> list[Problem]:
    """Why DeepEP cannot carry a run. `groups`: the degrees ep and etp of each stage, and its ranks. That a group lies on hosts as it must shows when the run begins."""
    if recipe.dispatch.transport != "deepep":
        return []
    found = [_problem(rule, hint) for wrong, rule, hint in _rules(recipe) if wrong]
    for ep, etp, ranks in dict.fromkeys(groups):
        if ep * etp > 1:
            rules = _group_rules(spec, ep=ep, etp=etp, ranks=ranks)
            found += [_problem(rule, hint) for wrong, rule, hint in rules if wrong]
    return list(dict.fromkeys(found))


def _rules(recipe: Recipe) -> list[tuple[bool, str, str]]:
    device, dtype, r = recipe.launch.device_type, recipe.train.dtype, recipe.resilience
    return [
        (device != "cuda", f'stores tokens in the memory of other GPUs, and launch.device = "{device}" has none', 'launch.device = "cuda"'),
        (dtype != "bfloat16", f'carries bfloat16, and train.dtype = "{dtype}"', 'train.dtype = "bfloat16"'),
        (recipe.dispatch.policy != "dropless", f'sends tokens to all of their experts, and dispatch.policy = "{recipe.dispatch.policy}" leaves some out',
         'dispatch.policy = "dropless"'),
        (recipe.train.deterministic, "refuses torch's deterministic algorithms, for which train.deterministic asks", "train.deterministic = false"),
        (r.slots_per_rank is not None, f"knows one rank for each expert, and resilience.slots_per_rank = {r.slots_per_rank} makes replicas", "leave that out"),
        (bool(r.heal), "waits on the device for a lost rank, which no abort ends, and resilience.heal = true wants it ended", "resilience.heal = false"),
        (r.check != "off", f'moves tokens by itself, which resilience.check = "{r.check}" does not check', 'resilience.check = "off"'),
    ]  # fmt: skip


def _group_rules(spec: ModelSpec, *, ep: int, etp: int, ranks: int) -> list[tuple[bool, str, str]]:
    grain, widest = WIDTHS[ep > HOST_RANKS]
    width = min(widest, max(grain, round(spec.hidden / grain) * grain))
    each, most = spec.num_experts // ep, MOST_EXPERTS[ep > HOST_RANKS]
    place = "between hosts" if ep > HOST_RANKS else "within a host"
    size = _near_size(spec, ep=ep, ranks=ranks)
    return [
        (etp > 1, f"sends to whole experts, and folding.etp = {etp} cuts them", "folding.etp = 1"),
        (ep not in SIZES, f"is made for groups of {', '.join(map(str, SIZES))} ranks, and folding.ep = {ep}", size),
        (spec.hidden % grain > 0 or spec.hidden > widest, f"carries widths up to {widest} that {grain} divides, and the model's is {spec.hidden}",
         f"model.hidden = {width}"),
        (spec.top_k > MOST_CHOICES, f"takes {MOST_CHOICES} choices of a token, and the model has {spec.top_k}", f"model.top_k = {MOST_CHOICES}"),
        (each > most, f"takes {most} experts of a rank {place}, and folding.ep = {ep} gives {each}", size or f"model.num_experts = {ep * most}"),
    ]  # fmt: skip


def _near_size(spec: ModelSpec, *, ep: int, ranks: int) -> str:
    """The setting of the size nearest to `ep` that splits the experts and a stage's `ranks`, and breaks no rule; empty where there is none."""

    def fits(size: int) -> bool:
        grain, widest = WIDTHS[size > HOST_RANKS]
        few = spec.num_experts <= size * MOST_EXPERTS[size > HOST_RANKS]
        return few and not (spec.num_experts % size or ranks % size or spec.hidden % grain) and spec.hidden <= widest

    sizes = [size for size in SIZES if fits(size)]
    return f"folding.ep = {min(sizes, key=lambda size: abs(size - ep))}" if sizes else ""


def host_problems(hosts: Sequence[int], *, num_experts: int) -> list[Problem]:
    """Why the ranks of a group do not lie as DeepEP takes them to. `hosts` of its positions."""
    if not hosts or _are_whole(hosts, size=len(hosts)):
        return []
    rule = f"takes each {min(HOST_RANKS, len(hosts))} ranks of a group to be one host's, and those of this one are on hosts {', '.join(map(str, hosts))}"
    fit = [size for size in SIZES if num_experts <= size * MOST_EXPERTS[size > HOST_RANKS]]
    sizes = [size for size in fit if len(hosts) % size == 0 and _are_whole(hosts, size=size)]
    return [_problem(rule, f"folding.ep = {max(sizes)}" if sizes else "")]


def _are_whole(hosts: Sequence[int], *, size: int) -> bool:
    """Whether groups of `size` neighbours would lie on hosts as they must."""
    together = min(HOST_RANKS, size)
    return all(len(set(hosts[at : at + together])) == 1 for at in range(0, len(hosts), together))
