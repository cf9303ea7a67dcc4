"""The page that shows runs in a browser, live and afterwards: figures, loads of experts, the mapping, recoveries and recorded steps, made from event logs alone.

The room decides what is sent to a browser and to whom. `PageServer` serves files of its own and JSON made from the index of a run (`observe/index`); whoever asks must know the token, call the
server by a name of this machine, and can name nothing but ids that the server gave. Logs are hostile input: texts go out bounded, and the page only ever sets them as text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.observe.page.server import PageServer as PageServer
    from phalanx.observe.page.view import find_runs as find_runs, peek as peek
else:
    __getattr__ = lazy(__name__)
