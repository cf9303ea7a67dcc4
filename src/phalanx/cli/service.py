"""phalanx service [HOST:PORT [--until-over] | --new-credentials FILE]

Keeps the membership service of one elastic run on several hosts, until it is ended. Run it where none of the run's hosts takes it along, at the
address by which they reach it, and give that to them: --resilience.service HOST:PORT. Its values die with it: a run pauses, and goes on once the service is
there again at the same address. The default is 127.0.0.1:29400, for hosts that are emulated on one machine; several runs need several services.

It speaks TLS, and only with who has the credentials of the run: a file with a key and its certificate, of mode 0600. Where PHALANX_CREDENTIALS names one it is
used, and made if it is not there; else a new one is made at each start, and its place is printed. Copy it to every host, and export PHALANX_CREDENTIALS=FILE there.

Ctrl-C ends it. SIGTERM does once the hosts of the run have ended, or after two minutes: whoever stops a whole job sends it to everything, and hosts hand over and save by it.

  --new-credentials FILE  write such a file, and end: for a secret of Kubernetes, say
  --until-over            end by itself when the run is over or was stopped and its hosts have ended; exit status 0 where all steps are done, else 1
  --help                  this text
"""

from __future__ import annotations

from pathlib import Path

from phalanx.core.arguments import print_usage
from phalanx.core.errors import ConfigError, printable
from phalanx.core.service_address import ServiceAddress, parse_service

DEFAULT = "127.0.0.1:29400"


def main(args: list[str]) -> int:
    """Run `phalanx service ARGS...`; returns the exit status."""
    if "-h" in args or "--help" in args:
        print_usage(__doc__)
        return 0
    if args[:1] == ["--new-credentials"] and len(args) == 2:
        from phalanx.runtime.membership import make_credentials

        make_credentials(Path(args[1]))
        return 0
    address = read([a for a in args if a != "--until-over"])
    from phalanx.runtime.membership import serve  # torch takes a second or two to import: not for --help

    until_over = "--until-over" in args
    finished = serve(address, until_over=until_over, tell=_tell)
    return 0 if finished or not until_over else 1


def read(args: list[str]) -> ServiceAddress:
    """Where to serve. Raises `ConfigError`."""
    address = parse_service(args[0] if args else DEFAULT)
    if len(args) > 1 or address is None or address.is_etcd:
        rule = "must be HOST:PORT"
        raise ConfigError.of("address", " ".join(args), rule, f"as in {DEFAULT}", subject="phalanx service")
    return address


def _tell(text: str) -> None:
    print(printable(text), flush=True)
