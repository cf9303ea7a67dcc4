"""Published models: the rows of `simulate/data/models.csv`, and the model that a row or a measurement of such a model means.

Decides which row a name means (variants and other ways to write it too), and what is assumed where a measurement's columns say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as AnyMapping
from importlib import resources

from phalanx.core.reading import parse_csv_table
from phalanx.plan.model import MlaSpec, ModelSpec, RouterSpec


def known_models() -> dict[str, dict[str, str]]:
    """Rows of `models.csv` by name."""
    source = resources.files("phalanx.simulate") / "data" / "models.csv"
    return {row["model"]: row for row in parse_csv_table(source.read_text(encoding="utf-8"), where="models.csv")}


def _known(name: str, models: AnyMapping[str, dict[str, str]]) -> dict[str, str] | None:
    """The row of a model; its variants too (proxies with fewer layers, names with a remark or a date, other ways to write them)."""
    plain = _plain(name)
    rows = {_plain(key): row for key, row in models.items()}
    if plain in rows:
        return rows[plain]
    longest = max((key for key in rows if plain.startswith(key)), key=len, default=None)
    if longest is not None:
        return rows[longest]
    longer = [key for key in rows if len(plain) >= 6 and key.startswith(plain)]
    return rows[longer[0]] if len(longer) == 1 else None


def _plain(name: str) -> str:
    """Letters and digits in front of a bracket; a point release of Llama 3 has the shape of its first."""
    short = re.sub(r"[^a-z0-9.]", "", name.lower().split(" (")[0])
    return re.sub(r"^(llama3)\.[0-9]", r"\1", short).replace(".", "")


def published_model(
    entry: AnyMapping[str, str], models: AnyMapping[str, dict[str, str]]
) -> tuple[ModelSpec, list[str]]:
    """Model of a row, as far as time and memory depend on it, and what was assumed: heads and vocabulary are in no column of it."""
    n = {k: int(float(entry[k] or 0)) for k in ("hidden", "layers", "experts", "topk", "ffn")}
    row, flags = _known(entry["model"], models), []
    if row is None or int(row["hidden"]) != n["hidden"]:
        row, flags = None, [f"unknown model {entry['model']}: heads of 128, 8 for keys and values, vocabulary 128256"]
    heads = int(row["heads"]) if row else max(1, n["hidden"] // 128)
    kv = int(row["kv_heads"]) if row else min(8, heads)
    gated = row is None or row["gated"].rstrip("?") in ("swiglu", "clamped swiglu", "geglu")
    if row is None and n["ffn"] == 4 * n["hidden"]:
        gated = False
        tp = int(float(entry["TP"] or 1))
        heads = kv = heads if heads % tp == 0 else -(-heads // tp) * tp
        flags = [f"unknown model {entry['model']}: {heads} heads, feed-forward of two matrices, vocabulary 51200"]
    mla, head_dim = None, n["hidden"] // heads if not gated and row is None else 128
    if row and row["attention"].startswith("MLA"):
        mla = MlaSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
        head_dim = 192
    elif row:
        head_dim = int(row["head_dim"])
    moe = n["experts"] > 0
    dense_layers = int(row["dense_layers"]) if row and moe else 0
    return ModelSpec(
        name=entry["model"],
        num_layers=n["layers"],
        hidden=n["hidden"],
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        vocab=int(row["vocab"]) if row else (128256 if gated else 51200),
        num_experts=n["experts"],
        top_k=n["topk"],
        expert_ffn=n["ffn"] if moe else 0,
        shared_ffn=int(row["shared_ffn_total"] or 0) if row and moe else 0,
        dense_layers=min(dense_layers, n["layers"]) if moe else n["layers"],
        dense_ffn=(int(row["dense_ffn"] or 0) if row and moe else 0) or (0 if moe else n["ffn"]),
        ffn_matrices=3 if gated else 2,
        mtp_layers=int(row["mtp"]) if row and "mtp" in entry.get("where_read", "").lower() else 0,
        mla=mla,
        router=RouterSpec(num_groups=8, group_topk=4) if mla and n["experts"] == 256 else RouterSpec(),
    ), flags
