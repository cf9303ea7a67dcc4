"""Who may ask the page's server and what it gives: a token, a name of this machine, ids of its own, and nothing else of the disk."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_events import a_run, ended, started
from long_run import write_run
from page_help import serving

from phalanx.cli import runs as runs_command, watch as watch_command
from phalanx.cli.main import main
from phalanx.core.events import (
    Collective,
    ExpertLoads,
    Note,
    Operation,
    StatePlaced,
    StepRecorded,
    TeamFormed,
    WentBack,
)
from phalanx.core.service_address import is_loopback
from phalanx.observe import JsonlSink, differences, recipe_values
from phalanx.observe.event_log import encode
from phalanx.observe.page import PageServer, find_runs, view as view_module
from phalanx.observe.page.mapping import as_told, in_order, read_label, who_holds
from phalanx.observe.page.view import GROUPS, RunView
from phalanx.plan.mapping import make_folding, parse_stages

pytestmark = pytest.mark.unit


def log(folder: Path, *events: Any, rank: int = 0) -> Path:
    sink = JsonlSink(folder, rank=rank)
    for event in events:
        sink.write(event)
    sink.close()
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = log(tmp_path_factory.mktemp("runs") / "laptop", *a_run(60))
    (folder / "recipe.toml").write_text('[train]\nsteps = 60\nlr = "a|b"\n')
    (folder.parent / "secret.toml").write_text("secret")
    with serving(folder) as found:
        yield found


def ask(
    server: PageServer,
    path: str,
    *,
    method: str = "GET",
    host: str | None = None,
    cookie: str | None = "right",
    **headers: str,
) -> tuple[int, Any, bytes]:
    """Status, headers, body."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    sent = {"Host": f"127.0.0.1:{port}" if host is None else host, **headers}
    if cookie is not None:
        sent["Cookie"] = f"{server.cookie}={server.token}" if cookie == "right" else cookie
    for name, value in sent.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def get(server: PageServer, path: str) -> Any:
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


# ---- who may ask -----------------------------------------------------------------------------------------------------


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: PageServer) -> None:
    path = server.url.partition(str(server.server_address[1]))[2]
    status, headers, body = ask(server, path, cookie=None)
    assert status == 303 and headers["Location"] == "/" and server.token not in body.decode()
    cookie = headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert ask(server, "/", cookie=cookie.split(";")[0])[0] == 200
    assert len(server.token) >= 32


@pytest.mark.parametrize(
    "cookie", [None, "", "phalanx=x", "{name}=", "{name}=x", "{name}={token}x", "other={token}", "{name}=\u00e4"]
)
@pytest.mark.parametrize("path", ["/", "/static/app.js", "/first", "/runs", "/run/r1/all", "/changes?of=r1:0:-:0:1"])
def test_nothing_is_said_without_it(server: PageServer, path: str, cookie: str | None) -> None:
    given = None if cookie is None else cookie.format(name=server.cookie, token=server.token)
    status, _, body = ask(server, path, cookie=given)
    assert status == 403 and b"laptop" not in body and server.token.encode() not in body


def test_a_wrong_token_sets_no_cookie(server: PageServer) -> None:
    for token in ("", "x", server.token[:-1], server.token + "x", "%FF"):
        status, headers, _ = ask(server, f"/?token={token}", cookie=None)
        assert status == 403 and headers["Set-Cookie"] is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example:1",
        "",
        "[::2]",
        "10.0.0.1:{port}",
        "a@127.0.0.1",
    ],
)
def test_it_answers_to_names_of_this_machine_alone(server: PageServer, host: str) -> None:
    """Or a page of somebody else, whose name leads here, could read with the browser's help."""
    for path in ("/", f"/?token={server.token}"):
        status, headers, _ = ask(server, path, host=host.format(port=server.server_address[1]))
        assert status == 421 and headers["Set-Cookie"] is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"])
def test_a_forwarded_port_is_answered(server: PageServer, host: str) -> None:
    assert ask(server, "/", host=host)[0] == 200


def test_a_server_that_others_reach_answers_to_addresses_and_its_own_names(tmp_path: Path) -> None:
    with serving(log(tmp_path / "run", *a_run(3)), address="0.0.0.0") as server:
        for host, status in (
            ("10.1.2.3:80", 200),
            (socket.gethostname(), 200),
            ("evil.example", 421),
            ("10.1.2.3.evil.example", 421),
        ):
            assert ask(server, "/", host=host)[0] == status, host


def test_two_hosts_are_none(server: PageServer) -> None:
    port = server.server_address[1]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\nCookie: {server.cookie}={server.token}\r\n\r\n".encode()
        )
        assert b" 421 " in connection.recv(100)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_it_only_reads(server: PageServer, method: str) -> None:
    status, headers, _ = ask(server, "/", method=method)
    assert status == 405 and headers["Allow"] == "GET, HEAD"


def test_head_has_no_body(server: PageServer) -> None:
    status, headers, body = ask(server, "/static/app.js", method="HEAD")
    assert status == 200 and int(headers["Content-Length"]) > 1000 and not body


@pytest.mark.parametrize("path", ["/", "/static/style.css", "/run/r1/all", "/nothing", "/run/r1/holders"])
def test_every_answer_has_the_policy(server: PageServer, path: str) -> None:
    _, headers, _ = ask(server, path)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert (
        policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    )
    assert "unsafe" not in headers["Content-Security-Policy"] and "http" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers
    assert "Python" not in headers["Server"]


def test_refusals_too(server: PageServer) -> None:
    for answer in (ask(server, "/", cookie=None), ask(server, "/", host="evil"), ask(server, "/", method="POST")):
        assert "default-src 'none'" in answer[1]["Content-Security-Policy"]


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/..%2fserver.py", "/../../secret.toml", "/run/../secret.toml", "/run/laptop/all", "/run/r2/all", "/run/r1/recipe.toml", "/run/r1/events/rank-0.jsonl",
     "/run/r1/..", "/run/r1/lanes?step=999", "//etc/passwd", "/static/", "/static/app.js%00", "/changes?of=r9:0:-:0:1", "/recipes?of=%2e%2e", "/run/r1/lanes"],
)  # fmt: skip
def test_no_address_reaches_the_disk(server: PageServer, path: str) -> None:
    status, _, body = ask(server, path)
    assert status == 404 and b"secret" not in body and b"root:" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/run/r1/zoom?first=x&last=2",
        "/run/r1/zoom?first=1&last=" + "9" * 40,
        "/changes?of=r1",
        "/changes?of=r1:a:b:c:d",
        "/?" + "&".join(f"a{i}=1" for i in range(50)),
        "/run/r1/experts?layer=1e3",
        "http://[",
    ],
)
def test_what_cannot_be_asked_is_refused(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] == 400


def test_texts_are_packed_where_the_browser_can(server: PageServer) -> None:
    _, headers, body = ask(server, "/static/app.js", Accept_Encoding="gzip")
    plain = ask(server, "/static/app.js")[2]
    assert headers["Content-Encoding"] == "gzip" and gzip.decompress(body) == plain and len(body) < len(plain) / 2


def test_the_page_asks_nobody_else(server: PageServer) -> None:
    """None of its files names another server, sets HTML from text, or needs a policy that is weaker."""
    for name, (_, body) in server.files.items():
        text = body.decode()
        assert not [
            word
            for word in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "https://",
                "style=",
                " onclick",
                "<style",
                "importScripts",
            )
            if word in text
        ], name
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), name


def test_its_files_are_in_the_wheel(server: PageServer) -> None:
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["phalanx"]
    package = root / "src" / "phalanx"
    packed = {path.relative_to(package) for pattern in patterns for path in package.glob(pattern)}
    assert {Path("observe/page/static") / name for name in server.files} <= packed


@pytest.mark.parametrize(
    ("address", "alone"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("10.1.2.3", False), ("host", False)],
)
def test_what_is_this_machine_alone(address: str, alone: bool) -> None:
    assert is_loopback(address) is alone


def is_answered(server: PageServer) -> bool:
    try:
        return ask(server, "/")[0] == 200
    except (http.client.HTTPException, OSError):
        return False


def until(holds: Callable[[], bool], *, seconds: float = 30.0) -> bool:
    """Whether it holds at last."""
    end_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def test_so_many_connections_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.observe.page.server.MOST_CONNECTIONS", 3)
    with serving(log(tmp_path / "run", *a_run(5))) as server:
        held = [socket.create_connection(("127.0.0.1", server.server_address[1])) for _ in range(3)]
        assert until(lambda: not is_answered(server)), "the fourth is sent away"
        for connection in held:
            connection.close()
        assert until(lambda: is_answered(server)), "there is room again"


# ---- what it gives ---------------------------------------------------------------------------------------------------


def joined(old: dict[str, Any], more: dict[str, Any]) -> dict[str, list[Any]]:
    """As the page does it (app.js: joined)."""
    at = (more["first"] - old["first"]) // more["width"]
    return {name: [*values[:at], *more["mean"][name]] for name, values in old["mean"].items()}


@pytest.mark.parametrize("steps", [5, GROUPS, 3 * GROUPS + 7])
def test_what_is_new_and_what_was_there_is_the_whole(tmp_path: Path, steps: int) -> None:
    folder = log(tmp_path / "run", *list(a_run(steps))[:-1])
    view = RunView(folder, id="r1")
    view.open()
    while view.progress is not None:
        view.advance()
    before = view.snapshot()
    curves = before["curves"]
    last_group = curves["first"] + (len(curves["times"]) - 1) * curves["width"]
    log(folder, *(ended(s) for s in range(steps + 1, steps + 4)))
    view.advance()
    news = view.snapshot(known=before["version"], width=curves["width"], first=last_group)
    whole = view.snapshot()
    assert news["head"]["step"] == steps + 3
    if whole["curves"]["width"] == curves["width"]:
        assert len(news["curves"]["times"]) <= 4
        assert joined(curves, news["curves"]) == whole["curves"]["mean"]
    else:
        assert news["curves"] == whole["curves"], "of another width all is sent"


@pytest.mark.parametrize("went_back", [True, False])
def test_what_is_another_now_is_sent_again(tmp_path: Path, went_back: bool) -> None:
    """Steps that training went back behind, and a run that began anew in the same folder."""
    folder = log(tmp_path / "run", *list(a_run(40))[:-1], Note(level="info", text="before"))
    view = RunView(folder, id="r1")
    view.open()
    before = view.snapshot()
    if went_back:
        back = WentBack(history=1, step=20, from_step=40, why="", damaged=(), abandoned=())
        log(folder, back, *(replace(ended(s), loss=9.0) for s in range(21, 31)))
    else:
        (folder / "events" / "rank-0.jsonl").unlink()
        log(folder, started(), *(replace(ended(s), loss=9.0) for s in range(1, 11)), Note(level="info", text="after"))
    while view.advance():
        pass
    news = view.snapshot(known=before["version"], width=1, first=40)
    whole = view.snapshot()
    assert news["version"] > before["version"]
    assert news["curves"] == whole["curves"] and whole["curves"]["mean"]["loss"][-10:] == [9.0] * 10
    assert news["notes"] == whole["notes"] and (went_back or [n["text"] for n in news["notes"]] == ["after"])


def test_a_browser_waits_for_news(server: PageServer) -> None:
    known = get(server, "/run/r1/all")
    folder = server.views["r1"].folder
    asked = f"/changes?of=r1:{known['version']}:-:{known['curves']['width']}:1"
    begin_s = time.monotonic()
    log(folder, ended(61))
    found = get(server, asked)["runs"]
    assert found[0]["head"]["step"] == 61 and found[0]["version"] > known["version"]
    assert time.monotonic() - begin_s < 15, "it waits for the news, not for its longest time"


def test_a_run_is_looked_at_as_fine_as_it_is_known(server: PageServer) -> None:
    found = get(server, "/run/r1/zoom?first=11&last=20")
    assert found["first"] == 11 and found["width"] == 1 and len(found["mean"]["loss"]) == 10
    assert found["mean"]["loss"][0] == pytest.approx(ended(11).loss, rel=1e-4)


@pytest.mark.parametrize(
    ("last", "ago_s", "status"),
    [("finished", 0, "finished"), ("interrupted", 0, "stopped"), ("RunError: broken", 0, "failed"), (None, 0, "training"), (None, 3600, "silent")],
)  # fmt: skip
def test_the_status_says_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str | None, ago_s: float, status: str
) -> None:
    from phalanx.core.events import RunEnded

    folder = log(
        tmp_path / "run",
        started(total_steps=100),
        ended(1),
        *([RunEnded(step=1, reason=last, seconds=1.0)] if last else []),
    )
    view = RunView(folder, id="r1")
    view.open()
    now_s = time.time()
    monkeypatch.setattr("phalanx.observe.page.view.time.time", lambda: now_s + ago_s)
    head = view.summary()
    assert head["status"] == status and head["reason"] == ("RunError: broken" if status == "failed" else "")
    assert head["left_s"] == pytest.approx(99 * 0.73)


@pytest.mark.parametrize("has_log", [True, False])
def test_a_run_that_was_killed_before_its_first_event_is_not_starting_for_ever(has_log: bool, tmp_path: Path) -> None:
    events = tmp_path / "run" / "events"
    events.mkdir(parents=True)
    if has_log:
        (events / "rank-0.jsonl").touch()
    for ago_s, status in ((60, "starting"), (3600, "silent")):
        at_s = time.time() - ago_s
        for path in (events, *events.iterdir()):
            os.utime(path, (at_s, at_s))
        (row,) = runs_command.list_runs(tmp_path)
        assert (row["status"], row["reason"]) == (status, "no event was logged yet")
        assert row["heard_s"] == pytest.approx(at_s, abs=1)
        assert RunView(tmp_path / "run", id="r1").summary()["status"] == status


def test_every_answer_is_json_of_finite_numbers(tmp_path: Path) -> None:
    folder = log(
        tmp_path / "run",
        started(),
        ended(1, loss=float("nan"), grad_norm=float("inf")),
        ended(2, lr=1e300, tokens=2**62),
    )
    with serving(folder) as server:
        found = get(server, "/run/r1/all")
    assert found["curves"]["mean"]["loss"][0] is None and found["head"]["step"] == 2
    json.dumps(found, allow_nan=False)


def recorded_run(folder: Path, *, ranks: int) -> Path:
    """Steps 3 and 4 of 6 are recorded: arithmetic from 0 to 6 ms; a message from 2 to 8 ms, for which each rank waits 2 ms."""
    for rank in range(ranks):
        events: list[Any] = [started(rank=rank, world=ranks, total_steps=6, folding=f"dp{ranks}|ep{ranks}")]
        for step in range(1, 7):
            at = time.time()
            events.append(ended(step))
            if step in (3, 4):
                events += [
                    Operation(op_id="mb0.L0.fwd.experts", lane="compute", begin_s=at, end_s=at + 0.006),
                    Collective(op_id="mb0.L0.fwd.dispatch.rows", op="all_to_all", axis="ep", size=ranks, sent_bytes=1000, begin_s=at + 0.002, end_s=at + 0.008, waited_s=0.002, ranks=tuple(range(ranks))),
                    StepRecorded(step=step, begin_s=at, end_s=at + 0.01),
                ]  # fmt: skip
        log(folder, *events, rank=rank)
    return folder


def test_lanes_tell_hidden_from_exposed(tmp_path: Path) -> None:
    with serving(recorded_run(tmp_path / "run", ranks=2)) as server:
        assert [r["step"] for r in get(server, "/run/r1/all")["recorded"]] == [3, 4]
        found = get(server, "/run/r1/lanes?step=4")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1] and found["seconds"] >= 0.008
    lanes = {lane["name"]: lane["spans"] for lane in found["ranks"][0]["lanes"]}
    assert [(round(length), kind) for _, length, kind, _ in lanes["compute"]] == [(6000, 0)]
    assert [(round(length), kind) for _, length, kind, _ in lanes["waiting"]] == [(2000, 1)]
    assert [(round(length), kind) for _, length, kind, _ in lanes["ep"]] == [(4000, 2), (2000, 1)]
    assert found["exposure"][0]["what"] == "layer 0 forward" and found["exposure"][0]["exposed_s"] == pytest.approx(
        0.002, abs=2e-4
    )


def test_who_holds_what() -> None:
    folding = make_folding(world=8, tp=2, ep=4)
    assert read_label(folding.label()) == folding
    staged = parse_stages(["tp1", "tp1"])
    assert read_label(staged.label()) == staged
    found = who_holds(in_order(folding.label(), layers=2, experts=16))
    assert found["ranks"][3] == [3, 0, 0, 3, 1, 0, 1, 0], "rank, stage, edp, ep, tp, cp, dp, etp"
    assert found["layers"] == [["layer 0", 0, 0], ["layer 1", 0, 0]] and found["tables"][0][3] == (12, 13, 14, 15)
    assert found["stages"] == [
        {"first": 0, "ranks": 8, "degrees": {"tp": 2, "cp": 1, "dp": 4, "etp": 1, "ep": 4, "edp": 2}, "layers": None}
    ]
    assert found["alone"][3] == {"ranks": [3], "fewer": 8, "lost": 0, "named": [], "dense": True}
    for wrong in (
        None,
        "",
        "dp2",
        "<b>|ep2",
        "dp2|ep3",
        "dp99999|ep2",
        "dp0|ep0",
        "tp99999/tp1",
        "x" * 9999,
        7,
        ["dp2|ep2"],
        "dp4|ep2.ep2.zz9",
    ):
        assert in_order(wrong, layers=1, experts=8) is None, wrong


STAGED = StatePlaced(
    step=0, why="start", folding="tp1/tp2.dp2.ep4/tp2.ep2.etp1", layers=((0,), (1, 2, 3), (4,)), experts=8, expert_layers=(1, 2, 4)
)  # fmt: skip
"""Seven ranks; the first layers are dense."""
REPLICATED = StatePlaced(
    step=7, why="members", folding="dp4|ep4", layers=((0, 1),), experts=4, expert_layers=(0, 1), slots_per_rank=2,
    slots=(((0,), ((0, 1), (2, 3), (0, 1), (2, 2))), ((1,), ((0, 1), (0, 1), (2, 3), (2, 3)))),
    members=("h0.0.a", "h0.1.a", "h1.0.a", "h1.1.a", "h1.2.a"), hosts=(0, 0, 1, 1), minimum=2, holders=2,
)  # fmt: skip
"""Expert 3 of layer 0 is on rank 1 alone, and layer 1 is on one host each; a fifth member is idle."""


def told(event: StatePlaced) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(who_holds(as_told(event))))
    return found


def test_stages_have_layers_and_foldings_of_their_own() -> None:
    found = told(STAGED)
    assert [(s["first"], s["ranks"], s["layers"]) for s in found["stages"]] == [(0, 1, "0"), (1, 4, "1-3"), (5, 2, "4")]
    assert found["layers"] == [["layer 1", 1, 0], ["layer 2", 1, 0], ["layer 4", 2, 1]]
    assert [[row[0], row[1], row[3], row[4]] for row in found["ranks"]] == [
        [0, 0, 0, 0], [1, 1, 0, 0], [2, 1, 1, 1], [3, 1, 2, 0], [4, 1, 3, 1], [5, 2, 0, 0], [6, 2, 1, 1],
    ]  # fmt: skip
    assert found["tables"] == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert found["alone"][0] == {"ranks": [0], "fewer": 0, "lost": 0, "named": [], "dense": False}
    assert found["alone"][2] == {
        "ranks": [2], "fewer": 0, "lost": 4, "named": [["layer 1", 2], ["layer 1", 3], ["layer 2", 2], ["layer 2", 3]], "dense": True
    }  # fmt: skip
    assert found["alone"][6]["dense"] is False, "the only rank with its part of attention in that stage"


def test_what_is_lost_with_a_rank_and_with_its_host() -> None:
    found = told(REPLICATED)
    assert found["idle"] == ["h1.2.a"] and (found["size"], found["minimum"], found["holders"]) == (5, 2, 2)
    rank, host = found["alone"], found["with_host"]
    assert rank[1] == {"ranks": [1], "fewer": 3, "lost": 1, "named": [["layer 0", 3]], "dense": True}
    assert rank[0] == {"ranks": [0], "fewer": 4, "lost": 0, "named": [], "dense": True}
    assert host["0"] == {"ranks": [0, 1], "fewer": 3, "lost": 3, "named": [["layer 0", 3], ["layer 1", 0], ["layer 1", 1]], "dense": True}  # fmt: skip
    both = as_told(REPLICATED).lost_with([1, 3])  # type: ignore[union-attr]
    assert both["named"][:2] == [["layer 0", 2], ["layer 0", 3]], "in two slots of a rank it is one copy"
    assert host["1"]["named"] == [["layer 1", 2], ["layer 1", 3]] and set(host) == {"0", "1"}


def test_a_copy_is_lost_with_any_rank_of_its_etp_group() -> None:
    event = StatePlaced(step=0, why="start", folding="dp4|etp2.ep2", layers=((0,),), experts=2, expert_layers=(0,))
    assert [loss["named"] for loss in told(event)["alone"]] == [[["layer 0", e]] for e in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"folding": "dp4|ep3"}, {"layers": ()}, {"layers": ((0,), (1,))}, {"expert_layers": (0, 9)}, {"experts": -1}, {"experts": 10**12}, {"experts": 3},
        {"hosts": (0, 1)}, {"slots": (((0,), ((0, 1),)),)}, {"slots": (((0,), ((0, -1), (2, 3), (0, 1), (2, 2))),)},
    ],
)  # fmt: skip
def test_a_placement_that_cannot_be_is_not_drawn(change: dict[str, Any]) -> None:
    assert told(replace(REPLICATED, **change))["ranks"] == []


def test_experts_too_many_for_a_line_are_not_made_up() -> None:
    found = told(replace(REPLICATED, slots=()))
    assert found["layers"] == [] and found["replicas"] == 2 and len(found["ranks"]) == 4


def test_who_holds_what_is_read_from_the_log_as_it_was_and_as_it_is(tmp_path: Path) -> None:
    """After a recovery and a rebalance, also by the index alone; of what was not told yet nothing is said."""
    (_, first), (_, second) = REPLICATED.slots
    moved = replace(REPLICATED, step=9, why="balance", slots=(((0,), second), ((1,), first)))
    team = replace(SMALLER_TEAM, members=5, folding="dp4|ep4")
    folder = log(tmp_path / "run", started(), replace(STAGED, step=1, folding="dp2|ep2"))
    log(folder, started(rank=1), ended(5), team, REPLICATED, rank=1)  # the first rank is another for a while
    log(folder, ended(9), moved)
    with serving(folder) as server:
        placed = get(server, "/run/r1/all")["placed"]
        assert [(p["step"], p["why"]) for p in placed] == [(1, "start"), (7, "members"), (9, "balance")]  # fmt: skip
        before, after = (get(server, f"/run/r1/holders?at={p['at']}")["tables"] for p in placed if p["step"] in (7, 9))
        assert before[0] == [[0, 1], [2, 3], [0, 1], [2, 2]] and after == before[::-1]
        assert get(server, "/run/r1/holders")["tables"] == after
        assert ask(server, "/run/r1/holders?at=12.5")[0] == 404 and ask(server, "/run/r1/holders?at=x")[0] == 400
    view = RunView(folder, id="r1")
    view.open()
    view.index.save()
    again = RunView(folder, id="r1")
    assert again.index.load()
    assert again.index.course.placed == view.index.course.placed and again.holders() == view.holders()
    log(folder, replace(team, generation=3, folding="dp3|ep3"), rank=1)
    view.advance()
    assert (view.holders()["world"], view.holders()["members"]) == (3, []), "the label alone"


def test_an_index_names_no_file_of_its_own(tmp_path: Path) -> None:
    folder = log(tmp_path / "run", started(), REPLICATED)
    log(tmp_path / "other", started(), REPLICATED)
    view = RunView(folder, id="r1")
    view.open()
    entry = view.index.course.placed[0]
    assert view_module.read_placed(view.index.files, entry) == REPLICATED
    for wrong in ({"log": "../../other/events/rank-0.jsonl"}, {"log": "rank-9.jsonl"}, {"offset": 3}, {"offset": 1 << 40}):  # fmt: skip
        assert view_module.read_placed(view.index.files, entry | wrong) is None, wrong


def test_experts_with_replicas_are_in_no_order(tmp_path: Path) -> None:
    """Of a log that does not tell who holds what."""
    folder = log(tmp_path / "run", started(), ended(1), ExpertLoads(step=1, counts=((1, 2, 3, 4),)))
    with serving(folder) as server:
        assert get(server, "/run/r1/holders")["tables"] == [[[0], [1], [2], [3]]]
        (folder / "recipe.toml").write_text("[resilience]\nslots_per_rank = 3\n")
        found = get(server, "/run/r1/holders")
        assert found["layers"] == [] and len(found["ranks"]) == 4


def test_loads_are_of_the_layers_that_the_model_names(tmp_path: Path) -> None:
    loads = ExpertLoads(step=1, counts=((1, 2, 3, 4),) * 3)
    view = RunView(log(tmp_path / "run", started(), ended(1), loads), id="r1")
    view.open()
    assert view.snapshot()["experts"]["layers"] == [0, 1, 2], "the log does not tell"
    told = log(tmp_path / "told", started(), ended(1), loads, STAGED)
    view = RunView(told, id="r1")
    view.open()
    assert view.snapshot()["experts"]["layers"] == [1, 2, 4]
    (told / "events/rank-0.jsonl").unlink()
    assert view.snapshot()["experts"]["layers"] == [0, 1, 2]


SMALLER_TEAM = TeamFormed(
    generation=2,
    members=3,
    step=5,
    folding="dp3|edp3",
    why="lost",
    noticed_s=0.1,
    formed_s=0.1,
    built_s=0.1,
    moved_s=0.1,
    moved_bytes=9,
    checked=1,
)
"""What was formed after a loss."""


def test_what_a_member_tells_later_is_sent_again(tmp_path: Path) -> None:
    """Seconds of a recovery are those of its slowest member, whose log may be read last."""
    folder = log(tmp_path / "run", started(), ended(5), SMALLER_TEAM)
    view = RunView(folder, id="r1")
    view.open()
    before = view.snapshot()
    log(folder, replace(SMALLER_TEAM, moved_s=7.0), ended(6), rank=1)
    view.advance()
    news = view.snapshot(known=before["version"], width=1)
    assert [r["moved_s"] for r in news["recoveries"]] == [7.0] and "notes" not in news and "checkpoints" not in news


def test_one_run_that_cannot_be_understood_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.observe.index import RunIndex

    good, bad = log(tmp_path / "good", *a_run(5)), log(tmp_path / "bad", *a_run(5))
    made = RunIndex.take

    def take(self: Any, record: Any) -> None:
        if self.files.folder == bad:
            raise KeyError("at")
        made(self, record)

    monkeypatch.setattr(RunIndex, "take", take)
    with serving(good, bad) as server:
        assert "cannot be understood" in get(server, "/run/r2/all")["problem"]
        time.sleep(0.5)
        log(good, ended(6))
        known = get(server, "/run/r1/all")
        assert (
            known["head"]["step"] == 6
            or get(server, f"/changes?of=r1:{known['version']}:-:1:1")["runs"][0]["head"]["step"] == 6
        )


def test_a_recovery_shows_the_new_folding(tmp_path: Path) -> None:
    folder = log(tmp_path / "run", started(), ended(5), SMALLER_TEAM)
    view = RunView(folder, id="r1")
    view.open()
    assert (view.summary()["folding_now"], view.summary()["members"]) == ("dp3|edp3", 3)


def test_a_start_after_a_recovery_shows_its_own_folding(tmp_path: Path) -> None:
    """Of a run that was elastic before; in an elastic one a rank that joins tells of a start just behind the team that it joins."""
    path = tmp_path / "run" / "events" / "rank-0.jsonl"
    path.parent.mkdir(parents=True)
    for at, shown in ((10.2, ("dp3|edp3", 3)), (60.0, (started().folding, started().world))):
        told = [(0.0, started()), (5.0, ended(5)), (10.0, SMALLER_TEAM), (at, started(step=5))]
        path.write_bytes(b"".join(encode(event, time_s=1e9 + s) for s, event in told))
        view = RunView(tmp_path / "run", id="r1")
        view.open()
        assert (view.summary()["folding_now"], view.summary()["members"]) == shown


# ---- recipes and lists -----------------------------------------------------------------------------------------------


def test_differences_of_recipes(tmp_path: Path) -> None:
    for name, lr in (("a", "0.1"), ("b", "0.2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(
            f'[run]\nname = "{name}"\n[optim]\nlr = {lr}\nzero = 1\n' + ("[extra]\nx = [1, 2]\n" if name == "b" else "")
        )
    found = {name: recipe_values(tmp_path / name) for name in "ab"}
    assert differences(found) == [("extra.x", [None, "[1, 2]"]), ("optim.lr", ["0.1", "0.2"])]


def test_a_recipe_is_read_through_no_link_and_not_whole_if_it_is_long(tmp_path: Path) -> None:
    (tmp_path / "secret.toml").write_text('[a]\nsecret = "x"\n')
    (tmp_path / "recipe.toml").symlink_to(tmp_path / "secret.toml")
    assert recipe_values(tmp_path) == {}
    (tmp_path / "recipe.toml").unlink()
    for text in (
        "[a]\nb = '" + "x" * (300 << 10) + "'\n",
        "not toml",
        '[a]\nb = "\udcff'.encode("utf-8", "surrogateescape"),
    ):
        (tmp_path / "recipe.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        assert recipe_values(tmp_path) == {}
    (tmp_path / "recipe.toml").write_text('[a]\nb = "' + "x" * 5000 + '\\u202E"\n')
    assert len(recipe_values(tmp_path)["a.b"]) < 250


def test_runs_are_found_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path / "one", *a_run(30))
    write_run(tmp_path / "two", steps=2000, ranks=1)
    (tmp_path / "linked").symlink_to(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    assert [p.name for p in find_runs(tmp_path)] == ["one", "two"]
    assert main(["runs", str(tmp_path), "--json", str(tmp_path / "list.json")]) == 0
    said = capsys.readouterr().out
    assert "30/30" in said and "2000/2000" in said and "finished" in said and "linked" not in said
    rows = {r["folder"]: r for r in json.loads((tmp_path / "list.json").read_text())["runs"]}
    assert rows["two"]["tokens"] == 2000 * 524288, "from its first and last lines"
    assert rows["two"]["step"] == 2000 and rows["two"]["validation"] == pytest.approx(2 + 8 * np.exp(-2000 / 9000))
    assert main(["runs", str(tmp_path / "nothing")]) == 2
    assert "phalanx train makes" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "empty")]) == 0


def test_a_run_that_one_may_not_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private run of somebody else; and of too many those stay that were written last."""
    for i, name in enumerate(("c", "a", "b", "private")):
        log(tmp_path / name, *a_run(3))
        os.utime(tmp_path / name / "events" / "rank-0.jsonl", (1000 + i, 1000 + i))
    made = os.stat

    def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if "private" in str(path):
            raise PermissionError(13, "Permission denied")
        return made(path, *args, **more)

    monkeypatch.setattr(os, "stat", stat)
    assert [p.name for p in find_runs(tmp_path)] == ["a", "b", "c"]
    monkeypatch.setattr(view_module, "MOST_RUNS", 2)
    assert [p.name for p in find_runs(tmp_path)] == ["a", "b"]


def test_a_run_whose_rank_0_died_is_as_new_as_its_newest_log(tmp_path: Path) -> None:
    """In the list, of too many, and when a browser asks for nothing; its line tells the steps of those that live."""
    for name, at in (("old", 1000), ("lost", 500), ("new", 3000)):
        log(tmp_path / name, *a_run(3))
        os.utime(tmp_path / name / "events" / "rank-0.jsonl", (at, at))
    log(tmp_path / "lost", started(rank=1), *(ended(step) for step in range(1, 9)), rank=1)
    os.utime(tmp_path / "lost" / "events" / "rank-1.jsonl", (5000, 5000))
    assert view_module.written_s(tmp_path / "lost") == 5000 and view_module.written_s(tmp_path / "none") == 0.0
    assert view_module.peek(tmp_path / "lost", id="x").summary()["step"] == 8
    with serving(below=tmp_path) as server:
        ids = {r["folder"]: r["id"] for r in get(server, "/runs")["runs"]}
        assert get(server, "/first")["ids"] == [ids["lost"]]


def test_a_log_that_says_odd_things_leaves_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a log yet, and validations that are no numbers."""
    log(tmp_path / "one", *a_run(30))
    (tmp_path / "begun" / "events").mkdir(parents=True)
    for name, loss in (("text", '"bad"'), ("list", "[1]")):
        log(tmp_path / name, started(), ended(1))
        with (tmp_path / name / "events" / "rank-0.jsonl").open("a") as file:
            file.write(f'{{"kind":"Validated","time_s":{time.time()},"step":1,"loss":{loss},"seconds":1}}\n')
    assert main(["runs", str(tmp_path)]) == 0
    assert "30/30" in capsys.readouterr().out
    with serving(below=tmp_path) as server:
        assert {r["folder"] for r in get(server, "/runs")["runs"]} == {"one", "begun", "text", "list"}


def test_long_texts_do_not_squeeze_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path / ("a" * 60), started(folding="tp8.cp4.dp64.pp16|etp2.ep64.edp16.pp16"), ended(123456))
    runs_command.main([str(tmp_path)])
    assert "123456/300" in capsys.readouterr().out


def test_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in (("a", 30), ("b", 40)):
        log(tmp_path / name, *a_run(steps))
        (tmp_path / name / "recipe.toml").write_text(f"[train]\nsteps = {steps}\n")
    assert main(["metrics", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(tmp_path / "m.json")]) == 0
    said = capsys.readouterr().out
    assert said.index("train.steps") < said.index("training loss"), "what differs comes first"
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["differences"] == {"train.steps": ["30", "40"]}
    curves = found["runs"][1]["curves"]
    assert curves["step"] == list(range(1, 41)) and curves["train/loss"][3] == pytest.approx(ended(4).loss)
    assert len(curves["experts/load_of"][0]) == 4 and curves["exchange/exposed_s"][0] is None


def test_the_curve_has_nothing_for_what_is_no_number(tmp_path: Path) -> None:
    log(tmp_path / "a", started(), ended(1), ended(2, grad_norm=float("nan")))
    assert main(["metrics", str(tmp_path / "a"), "--json", str(tmp_path / "m.json")]) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    assert found["step"] == 2 and found["curves"]["train/grad_norm"] == [pytest.approx(ended(1).grad_norm), None]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_watched_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "nothing", "--port", "70000", "--folder", "none"]) == 2
    said = capsys.readouterr().err
    assert "3 problems" in said and "runs/laptop" in said and "65535" in said
    assert main(["watch"]) == 2 and "runs" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (tmp_path / "runs").mkdir()
        assert main(["watch", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port 0 takes a free port" in capsys.readouterr().err
    assert main(["watch", "--address", "no.such.host.invalid"]) == 2
    assert "--address" in capsys.readouterr().err


@pytest.mark.parametrize(("address", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_command_prints_what_to_open_and_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, address: str, warned: bool
) -> None:
    def interrupt(server: PageServer, console: Any) -> None:
        assert ask(server, "/runs")[0] == 200
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_command, "_wait", interrupt)
    folder = log(tmp_path / "run", *a_run(3))
    assert main(["watch", str(folder), "--port", "0", "--address", address]) == 0
    said = capsys.readouterr().out
    assert "/?token=" in said and ("not encrypted" in said) is warned


def test_a_run_that_is_named_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path / "runs" / "one", *a_run(3))
    monkeypatch.chdir(tmp_path)
    with serving(Path("runs/one"), tmp_path / "runs" / "one", below=Path("runs")) as server:
        assert get(server, "/first") == {"ids": ["r1"], "all": ["r1"]}


def test_runs_that_appear_later_are_found(tmp_path: Path) -> None:
    with serving(below=tmp_path) as server:
        assert get(server, "/first") == {"ids": [], "all": []}
        log(tmp_path / "new", *a_run(3))
        assert get(server, "/first")["ids"] == ["r1"]
        assert [r["folder"] for r in get(server, "/runs")["runs"]] == ["new"]
