"""Parts of `phalanx eval`: tasks as their files describe them, and the process in which lm-evaluation-harness runs.

The room decides what a task may ask for (`tasks.py`). Nothing of the harness is imported where a task is only read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.cli.evaluating.harness import OFFLINE as OFFLINE, HarnessJob as HarnessJob
    from phalanx.cli.evaluating.tasks import read_tasks as read_tasks, task_files as task_files
else:
    __getattr__ = lazy(__name__)
