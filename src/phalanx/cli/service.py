"""phalanx service [HOST:PORT]

Keeps the membership service of one run that heals itself on several hosts, until it is ended. Run it where none of the run's
hosts takes it along, and give its address to them: --resilience.service HOST:PORT. Its values die with it: a run pauses, and goes on
once the service is there again at the same address. The default is 0.0.0.0:29400; several runs need several services.

  --help                this text
"""

from __future__ import annotations

import signal

from phalanx.core.errors import ConfigError, Problem
from phalanx.core.service_address import parse_service

DEFAULT = "0.0.0.0:29400"


def main(args: list[str]) -> int:
    """Run `phalanx service ARGS...`; returns the exit status."""
    if "-h" in args or "--help" in args:
        print((__doc__ or "").strip())
        return 0
    text = args[0] if args else DEFAULT
    address = parse_service(text)
    if len(args) > 1 or address is None or address.is_etcd:
        problem = Problem(where="address", value=" ".join(args), rule="must be HOST:PORT", hint=f"as in {DEFAULT}")
        raise ConfigError([problem], subject="phalanx service")
    from phalanx.runtime.service import start_store  # torch takes a second or two to import: not for --help

    stop = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*stop, signal.SIGCHLD})
    store = start_store(address.host, address.port)
    print(f"membership service at {address.host}:{address.port}, process {store.pid}", flush=True)
    while True:
        if signal.sigwait({*stop, signal.SIGCHLD}) in stop:
            store.stop()
            return 0
        if store.reap():
            store = start_store(address.host, address.port)
            print(f"it ended, and is here again without its values, process {store.pid}", flush=True)
