"""What Python programs call, on top of everything: to train, open, plan, search, predict and prove.

The room decides nothing of its own: it reads recipes as the command line does, and starts `phalanx train` and `phalanx verify` in processes of their own, because ranks are forked and a caller's
threads would not survive that. `phalanx/__init__.py` shows its names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.api.planning import (
        load_recipe as load_recipe,
        make_plan as make_plan,
        predict as predict,
        search as search,
    )
    from phalanx.api.proving import verify_mapping as verify_mapping
    from phalanx.api.runs import open_run as open_run
    from phalanx.api.training import train_model as train_model
else:
    __getattr__ = lazy(__name__)
