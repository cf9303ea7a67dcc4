"""One host of a storm as a program of its own: `python -m phalanx_lab.bench.storm.host REQUEST`, started by `on_testbed.py` alone.

It does what `phalanx train` does on a host, and says on the storm's board in which phase its ranks are.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.runtime.membership.keys import TlsService
from phalanx.train.recovery.run import train_elastic
from phalanx.train.recovery.watch import PHASES
from phalanx_lab.bench.storm.board import PhaseBoard
from phalanx_lab.bench.storm.trainer import StormSetup, recipe_of
from phalanx_lab.bench.storm.watch import StormWatch


def main(argv: list[str]) -> int:
    """REQUEST: JSON; with `stop` the run is told to end and nothing else happens."""
    request = json.loads(argv[0])
    if "stop" in request:
        keys = TlsService("127.0.0.1", request["port"]).connect()
        keys.put("stop", request["stop"])
        return 0
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    setup, folder, host = StormSetup(**request["setup"]), Path(request["folder"]), request["host"]
    board = PhaseBoard(setup.ranks, PHASES, path=folder / "board")
    first = setup.slots * request["index"]
    watch = StormWatch(board, folder, host=host, start=request["start"], first=first)
    try:
        return train_elastic(recipe_of(setup, folder, host=host), threads=1, watch=watch)
    except PhalanxError as err:
        (folder / f"error-{host}-{request['start']}").write_text(f"{type(err).__name__}: {err}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
