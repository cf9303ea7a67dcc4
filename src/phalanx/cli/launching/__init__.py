"""How a run is started: what the command line asks for (`request.py`), the way between elastic and fixed (`choice.py`), and the script that starts it elsewhere (`scripts.py`)."""

from __future__ import annotations

from phalanx.cli.launching.choice import (
    WHERE as WHERE,
    Asked as Asked,
    Launch as Launch,
    Where as Where,
    choose as choose,
)
from phalanx.cli.launching.request import (
    Request as Request,
    is_run_of as is_run_of,
    read_args as read_args,
    read_recipe as read_recipe,
    trust_problems as trust_problems,
)
from phalanx.cli.launching.scripts import (
    NAMES as NAMES,
    cpus_of as cpus_of,
    fill as fill,
    job_name as job_name,
    script_of as script_of,
)
