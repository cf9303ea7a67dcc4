"""What a service may forget: old generations, and in etcd old versions of values, in a real etcd too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_membership import EtcdHost, etcd_program

from phalanx.runtime.membership import keys_etcd
from phalanx.runtime.membership.keys_etcd import EtcdKeys
from phalanx.runtime.membership.service import start_store


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdHost]:
    program = etcd_program()
    if program is None:
        pytest.skip("no etcd here: `sh scripts/etcd.sh` fetches it from the distribution's packages")
    found = EtcdHost(program, tmp_path / "etcd")
    yield found
    found.kill()


@pytest.mark.ranks
def test_etcd_forgets_old_versions(etcd: EtcdHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_etcd, "HISTORY_S", 0.0)
    service: Any = etcd.service
    keys, other = service.connect(), service.connect()
    for i in range(50):
        keys.put("beat", str(i))
    begun = keys._revision
    keys.tidy()
    old = {"key": other._name("beat"), "revision": str(begun - 10)}
    answer = other._ask("kv/range", old, lambda answer: answer, refused=True)
    assert answer == {}, "a version from before the compaction can still be read"
    other._revisions, other._revision = [], begun - 5
    other.tidy()  # somebody else was faster: no error, and the connection lives
    assert other.get("beat") == "49" and keys.values(["beat", "no"]) == ["49", None]


@pytest.mark.unit
def test_only_what_is_old_enough_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    keys = EtcdKeys.__new__(EtcdKeys)
    keys._revisions, keys._revision = [], 0
    clock = [0.0]
    monkeypatch.setattr(keys_etcd.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(keys, "_ask", lambda call, body, read, refused=False: asked.append((call, body, refused)))
    for minute in range(8):
        clock[0], keys._revision = minute * 60.0, 100 * (minute + 1)
        keys.tidy()
    assert asked == [("kv/compaction", {"revision": str(r)}, True) for r in (100, 200, 300)]


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["store", "etcd"])
def test_a_generation_is_forgotten_and_no_other(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    process = start_store() if engine == "store" else None
    service: Any = request.getfixturevalue("etcd").service if process is None else process.address
    try:
        keys = service.connect()
        for name in ("vote/1/0/a", "vote/1/1/a", "vote/10/0/a", "store/meet/e/1/x", "store/meet/e/2/x"):
            keys.put(name, "1")
        assert keys.delete_below("vote/1/", most=9) == 2 and keys.delete_below("store/meet/e/1/", most=9) == 1
        assert keys.listed("vote/") == ["vote/10/0/a"]
        assert keys.listed("store/") == ["store/meet/e/2/x"]
        assert keys.values(["vote/10/0/a", "no", "vote/1/0/a"]) == ["1", None, None]
    finally:
        if process is not None:
            process.stop()
