"""One run on one rank: its loop, and what stands around a step.

The room decides what is due between two steps (a save, an evaluation, a trace), what a run folder gets, and in which order a rank is put together: `assemble` makes its state from a model,
`make_parts` all that a step needs, `train` runs them from the command line. `Trainer` is the loop itself; an elastic run makes one in each generation and gives it what differs (`Elastic`).
The step is a room of its own (`train/step`), and so is everything before a model exists (`train/setup`). Other rooms use the loop: `recovery`, `placement`, `huggingface`, `sync`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.assembly import assemble as assemble, moment_dtype as moment_dtype, state_dtype as state_dtype
    from phalanx.train.build import make_loader as make_loader, make_parts as make_parts, token_batch as token_batch
    from phalanx.train.generation import Sampling as Sampling, generate as generate, load_model as load_model
    from phalanx.train.loop import Elastic as Elastic, Trainer as Trainer
    from phalanx.train.recording import MoveRecorder as MoveRecorder, Recorder as Recorder
    from phalanx.train.reporting import (
        Outcome as Outcome,
        RunEnd as RunEnd,
        RunProgress as RunProgress,
        Team as Team,
    )
    from phalanx.train.resume import (
        Fallback as Fallback,
        load_newest as load_newest,
        load_start as load_start,
        open_checkpoints as open_checkpoints,
        recipe_to_keep as recipe_to_keep,
        set_later_aside as set_later_aside,
        start_candidates as start_candidates,
        trained_text as trained_text,
    )
    from phalanx.train.run import train as train
    from phalanx.train.saving import load_state as load_state, read_run_state as read_run_state
    from phalanx.train.step_hook import NOWHERE as NOWHERE, NewPlacement as NewPlacement, Where as Where
    from phalanx.train.warm import warm_kernels as warm_kernels
else:
    __getattr__ = lazy(__name__)
