"""phalanx service [HOST:PORT] [--lighthouse URL [--lease SECONDS]]

Keeps the membership service of one elastic run on several hosts, until it is ended. Run it where none of the run's
hosts takes it along, and give its address to them: --resilience.service HOST:PORT. Its values die with it: a run pauses, and goes on
once the service is there again at the same address. The default is 0.0.0.0:29400; several runs need several services.

  --lighthouse URL      be one of several services, on several machines, of which torchft's lighthouse at URL (http://HOST:29510) says which one keeps
                        the values: when it dies another one takes its place. Needs torchft: pip install "phalanx[lighthouse]". All have the same lighthouse,
                        which serves nothing else, and hosts are told all addresses: --resilience.service NODE0:29400,NODE1:29400
  --lease SECONDS       10: after so long without a word of the lighthouse this service stops. All have the same. Longer than the lighthouse's heartbeat timeout (5 s
                        unless it was told otherwise); another one takes over after that timeout and 1.25 leases
  --help                this text
"""

from __future__ import annotations

import re
import signal

from phalanx.core.errors import ConfigError, Problem
from phalanx.core.service_address import ServiceAddress, parse_service

DEFAULT = "0.0.0.0:29400"
LEASE_S = 10.0
SHORTEST_S = 0.5


def main(args: list[str]) -> int:
    """Run `phalanx service ARGS...`; returns the exit status."""
    if "-h" in args or "--help" in args:
        print((__doc__ or "").strip())
        return 0
    address, lighthouse, lease_s = read(args)
    stop = {signal.SIGINT, signal.SIGTERM}
    if lighthouse:
        from phalanx.runtime.membership import engine, keep_while_named

        engine()  # or say at once that it is not there
        signal.pthread_sigmask(signal.SIG_BLOCK, stop)
        keep_while_named(address, lighthouse, lease_s=lease_s, stop=stop, tell=_tell)
        return 0
    from phalanx.runtime.membership import start_store  # torch takes a second or two to import: not for --help

    signal.pthread_sigmask(signal.SIG_BLOCK, {*stop, signal.SIGCHLD})
    store = start_store(address.host, address.port)
    _tell(f"membership service at {address.host}:{address.port}, process {store.pid}")
    while True:
        if signal.sigwait({*stop, signal.SIGCHLD}) in stop:
            store.stop()
            return 0
        if store.reap():
            store = start_store(address.host, address.port)
            _tell(f"it ended, and is here again without its values, process {store.pid}")


def read(args: list[str]) -> tuple[ServiceAddress, str, float]:
    """(address, lighthouse or "", lease in seconds). Raises `ConfigError` with all that is wrong."""
    words, given, problems = list(args), dict[str, str](), list[Problem]()
    for name in ("--lighthouse", "--lease"):
        if name in words:
            place = words.index(name)
            given[name] = words[place + 1] if place + 1 < len(words) else ""
            del words[place : place + 2]
    address = parse_service(words[0] if words else DEFAULT)
    if len(words) > 1 or address is None or address.is_etcd or address.standbys:
        problems.append(
            Problem(where="address", value=" ".join(words), rule="must be HOST:PORT", hint=f"as in {DEFAULT}")
        )
    lighthouse, lease = given.get("--lighthouse"), given.get("--lease")
    if lighthouse is not None and not re.fullmatch(r"https?://[^\s/:]+:\d+", lighthouse):
        rule = "must be the address of a lighthouse"
        problems.append(Problem(where="--lighthouse", value=lighthouse, rule=rule, hint="as in http://node9:29510"))
    if lease is not None and lighthouse is None:
        rule = "has no effect without --lighthouse: a service that is alone has no lease"
        problems.append(Problem(where="--lease", value=lease, rule=rule, hint="leave it out"))
    seconds = _seconds(lease)
    if seconds < SHORTEST_S:
        rule = f"must be a number of seconds, {SHORTEST_S:g} or more"
        problems.append(Problem(where="--lease", value=lease, rule=rule, hint=f"as in {LEASE_S:g}"))
    if problems or address is None:
        raise ConfigError(problems, subject="phalanx service")
    return address, lighthouse or "", seconds


def _seconds(text: str | None) -> float:
    """-1 where it is none."""
    if text is None:
        return LEASE_S
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else -1.0


def _tell(text: str) -> None:
    print(text, flush=True)
