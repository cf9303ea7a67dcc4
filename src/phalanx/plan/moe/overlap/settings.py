"""What a recipe may say about overlap inside a MoE layer, and where it can apply.

serial      dispatch, experts and combine one after the other
coarse:N    the tokens of a rank in N chunks, each dispatched while the one before is computed (as FasterMoE and Tutel do)
tiles       tile by tile, in serial order; `tiles:KEY=VALUE,...` by any schedule, and with any transport of rows
fine        tile by tile, by a fixed schedule
auto        tile by tile, by the schedule that the cost model finds fastest for the layer, the links and the loads at hand
fused       kernels that compute while they receive and send, on GPUs that reach each other's memory

Keys of `tiles:` are those of `TileSchedule`, and `rows`:

    parts=N          parts into which the tiles of a source are cut: a message brings one
    order=ORDER      serial, own_first or arrival
    own_before=S     with order=arrival: the share of the own first product before the first wait
    blocks=N         blocks of columns of the second product: a message takes one back
    hot_first=true   tiles of the slots with most rows come first
    rows=pairs       a row travels for each (token, expert) pair; rows=tokens: for each rank that a token needs; left out: whichever is fewer bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.reading import is_count
from phalanx.plan.moe.overlap.tiles import Order, TileSchedule, tile_schedule_problems

Kind = Literal["serial", "coarse", "tiles", "fine", "auto", "fused"]
RowsOf = Literal["pairs", "tokens"]
MOST_CHUNKS = 64
MOST_PARTS = 64
BLOCK_COLUMNS = 256
"""Least columns of a block of the second product."""
MOST_BLOCKS = 2
"""Each product of 256 rows in four blocks is 8 % slower than in one, in two 4 %."""
WHERE = "dispatch.overlap"
EXAMPLE = "tiles:parts=4,order=arrival,own_before=0.5,blocks=2"
IN_ORDER = TileSchedule()
"""Serial order, uncut."""
FINE = TileSchedule(parts=4, order="arrival", own_before=0.75)
"""Good where communication takes about as long as computing; `auto` finds the best one."""
CANDIDATES = tuple(
    dict.fromkeys(
        (
            TileSchedule(order="own_first"),
            *(
                TileSchedule(parts=parts, order="arrival", own_before=share)
                for parts in (1, 2, 4, 8)
                for share in (0.25, 0.5, 0.75, 1.0)
            ),
            FINE,
            TileSchedule(parts=4, order="own_first"),
            TileSchedule(blocks=2, order="own_first"),
            *(
                TileSchedule(parts=parts, blocks=2, order="arrival", own_before=share)
                for parts in (1, 2, 4)
                for share in (0.5, 0.75)
            ),
        )
    )
)
"""What `auto` chooses from, besides serial order. Where columns cannot be cut (`most_blocks`), those of two blocks have one."""


def most_blocks(hidden: int, columns: int = BLOCK_COLUMNS) -> int:
    """Most equal blocks of at least `columns` columns into which the second product can be cut."""
    return max((n for n in range(1, MOST_BLOCKS + 1) if hidden % n == 0 and hidden // n >= columns), default=1)


@dataclass(frozen=True, kw_only=True)
class OverlapSetting:
    """The value of `dispatch.overlap`, read."""

    kind: Kind
    chunks: int = 1
    """Chunks of `coarse`."""
    schedule: TileSchedule = IN_ORDER
    """Schedule of `tiles` and `fine`."""
    rows: RowsOf | None = None
    """What travels with `tiles`; None: whichever is fewer bytes."""

    @property
    def per_token(self) -> bool | None:
        """Whether a token goes to a rank once, whatever the number of its experts there; None: whichever is fewer bytes."""
        return None if self.rows is None else self.rows == "tokens"

    def __str__(self) -> str:
        """The setting as a recipe writes it; what is left out has its default."""
        if self.kind == "coarse":
            return f"coarse:{self.chunks}"
        if self.kind != "tiles":
            return self.kind
        said = {name: getattr(self.schedule, name) for name in KEYS if name != "rows"}
        words = [f"{name}={_word(value)}" for name, value in said.items() if value != getattr(IN_ORDER, name)]
        words += [] if self.rows is None else [f"rows={self.rows}"]
        return ":".join(["tiles", ",".join(words)] if words else ["tiles"])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (is_count(text) and 1 <= int(text) <= most):
            raise ValueError
        return int(text)

    return read


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


def _yes_or_no(text: str) -> bool:
    return _one_of("true", "false")(text) == "true"


KEYS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "parts": (_number(MOST_PARTS), f"a number from 1 to {MOST_PARTS}", "parts=4"),
    "order": (_one_of(*get_args(Order)), f"one of {', '.join(get_args(Order))}", "order=arrival"),
    "own_before": (_share, "a share from 0 to 1", "order=arrival,own_before=0.5"),
    "blocks": (_number(MOST_BLOCKS), f"a number from 1 to {MOST_BLOCKS}", "blocks=2"),
    "hot_first": (_yes_or_no, "true or false", "hot_first=true"),
    "rows": (_one_of(*get_args(RowsOf)), f"one of {', '.join(get_args(RowsOf))}", "rows=tokens"),
}
"""Key of `tiles:` -> how its value is read, what it may be, and a legal value. All of `TileSchedule` but its seed, and `rows`."""


def _read_options(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Values of the keys behind `tiles:`, and what is wrong with them."""
    found: dict[str, Any] = {}
    problems: list[Problem] = []

    def wrong(rule: str, hint: str) -> None:
        problems.append(Problem(where=WHERE, value=text, rule=rule, hint=hint))

    for word in text.partition(":")[2].split(","):
        key, equals, value = word.strip().partition("=")
        if key not in KEYS or not equals:
            wrong(f"{word!r} is none of tiles' options: KEY=VALUE with one of {', '.join(KEYS)}", EXAMPLE)
            continue
        if key in found:
            wrong(f"names {key} twice", EXAMPLE)
            continue
        read, rule, example = KEYS[key]
        try:
            found[key] = read(value)
        except ValueError:
            found[key] = None
            wrong(f"{key} = {value!r} must be {rule}", f"tiles:{example}")
    if not problems:
        for problem in tile_schedule_problems(TileSchedule(**{k: v for k, v in found.items() if k != "rows"})):
            key = problem.where.removeprefix("schedule.")
            wrong(f"{key} = {_word(problem.value)} {problem.rule}", EXAMPLE)
    return found, problems


def setting_problems(text: str) -> list[Problem]:
    """What is wrong with the words."""
    kind, colon, number = text.partition(":")
    if kind == "coarse":
        if is_count(number) and 2 <= int(number) <= MOST_CHUNKS:
            return []
        rule = f"coarse takes a number of chunks from 2 to {MOST_CHUNKS}"
        return [Problem(where=WHERE, value=text, rule=rule, hint="coarse:2")]
    if kind == "tiles" and colon:
        return _read_options(text)[1]
    if kind in ("serial", "tiles", "fine", "auto", "fused") and not colon:
        return []
    rule = "must be serial, coarse:N, tiles, tiles:KEY=VALUE,..., fine, auto or fused"
    return [Problem(where=WHERE, value=text, rule=rule, hint="auto")]


def parse_overlap(text: str) -> OverlapSetting:
    """Raises `ConfigError`."""
    raise_if(setting_problems(text), ConfigError, subject="the overlap of a MoE layer")
    kind, colon, number = text.partition(":")
    if kind == "coarse":
        return OverlapSetting(kind="coarse", chunks=int(number))
    if kind == "tiles" and colon:
        options = _read_options(text)[0]
        return OverlapSetting(kind="tiles", rows=options.pop("rows", None), schedule=TileSchedule(**options))
    return OverlapSetting(kind=kind, schedule=FINE if kind == "fine" else IN_ORDER)  # type: ignore[arg-type]


def block_problems(text: str, *, hidden: int) -> list[Problem]:
    """Why a legal setting has no effect on a model of this width: its columns cannot be cut into blocks."""
    if setting_problems(text):
        return []
    blocks, most = parse_overlap(text).schedule.blocks, most_blocks(hidden)
    if blocks <= most:
        return []
    rule = f"has no effect: {hidden} columns (model.hidden) make {most} block of at least {BLOCK_COLUMNS}, and not {blocks}"
    return [
        Problem(where=WHERE, value=text, rule=rule, hint=f"leave blocks out, or model.hidden = {2 * BLOCK_COLUMNS}")
    ]


def replica_problems(text: str) -> list[Problem]:
    """Why a legal setting cannot apply where experts have replicas."""
    if text == "serial" or text.startswith("coarse"):
        return []
    way = "runs kernels for" if text == "fused" else "goes tile by tile through"
    rule = f"{way} experts that each have one slot; experts with replicas (resilience.slots_per_rank) run serial or in chunks"
    return [Problem(where=WHERE, value=text, rule=rule, hint='"coarse:2", or "serial"')]


def overlap_problems(
    text: str, *, num_experts: int, group: int, transport: str, pad_to_capacity: bool
) -> list[Problem]:
    """Why a legal setting cannot apply. `group`: ranks of the largest expert-parallel group, ep x etp."""
    if setting_problems(text) or text == "serial":
        return []
    problems = []

    def wrong(rule: str, hint: str) -> None:
        problems.append(Problem(where=WHERE, value=text, rule=rule, hint=hint))

    if not num_experts:
        wrong("needs routed experts, and the model has none", 'use "serial"')
    elif group == 1:
        wrong("needs ranks that send rows to each other, and ep x etp = 1", 'set folding.ep = 2, or "serial"')
    if transport != "all_to_all":
        wrong(
            f'sends rows from rank to rank, and dispatch.transport = "{transport}" whole tokens',
            'transport "all_to_all"',
        )
    if pad_to_capacity and not text.startswith("coarse"):
        wrong("sends the rows that there are; dispatch.pad_to_capacity sends a fixed number", "pad_to_capacity = false")
    return problems


FUSED_DTYPES = ("bfloat16", "float32")


def fused_setting_problems(
    text: str, *, device: str, dtype: str, etp: int, kernels: str, bucket_mb: float, heals: bool
) -> list[Problem]:
    """Why the kernels of `fused` cannot carry a run. That the ranks of a group share a host shows when the run begins. `etp`: the largest of any stage.

    Reductions of gradients beside the backward pass would wait for multiprocessors that kernels hold which wait for other ranks: a circle.
    """
    if text != "fused":
        return []
    problems = []

    def wrong(rule: str, hint: str) -> None:
        problems.append(Problem(where=WHERE, value=text, rule=rule, hint=hint))

    if device != "cuda":
        rule = f'stores rows in the memory of other GPUs, and launch.device = "{device}" has none'
        wrong(rule, 'launch.device = "cuda", or "auto"')
    if dtype not in FUSED_DTYPES:
        wrong(f'has no kernels for train.dtype = "{dtype}"', f"one of {', '.join(FUSED_DTYPES)}")
    if etp > 1:
        wrong(f"computes whole experts, and folding.etp = {etp} cuts them", 'folding.etp = 1, or "fine"')
    if kernels != "fast":
        wrong(f'is a choice of kernels, which kernels.implementation = "{kernels}" replaces', 'use "serial"')
    if bucket_mb > 0:
        rule = f"needs all multiprocessors in the backward pass, and optim.bucket_mb = {bucket_mb:g} reduces gradients at the same time"
        wrong(rule, "optim.bucket_mb = 0")
    if heals:
        rule = "waits in kernels that no abort ends, and shares memory that a new process cannot join; resilience.heal = true needs both"
        wrong(rule, 'resilience.heal = false, or "fine"')
    return problems
