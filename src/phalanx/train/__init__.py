"""One optimizer step, and the loop around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.assembly import assemble as assemble, state_dtype as state_dtype
    from phalanx.train.build import make_loader as make_loader, make_parts as make_parts, token_batch as token_batch
    from phalanx.train.expert_figures import placement_in_use as placement_in_use, seconds_of_a_row as seconds_of_a_row
    from phalanx.train.generation import Sampling as Sampling, generate as generate
    from phalanx.train.loaded import load_model as load_model
    from phalanx.train.loop import Elastic as Elastic, Trainer as Trainer
    from phalanx.train.machine import (
        MemoryMeter as MemoryMeter,
        compare_clocks as compare_clocks,
        matmul_flops_per_s as matmul_flops_per_s,
        own_host as own_host,
        versions as versions,
    )
    from phalanx.train.optim import Optimizer as Optimizer, State as State, learning_rate as learning_rate
    from phalanx.train.recording import MoveRecorder as MoveRecorder, Recorder as Recorder
    from phalanx.train.reporting import Outcome as Outcome, RunProgress as RunProgress, summary_of as summary_of
    from phalanx.train.run import train as train
    from phalanx.train.run_folder import (
        RECIPE_FILE as RECIPE_FILE,
        RunFolder as RunFolder,
        choose_checkpoint as choose_checkpoint,
    )
    from phalanx.train.saving import load_state as load_state, read_run_state as read_run_state
    from phalanx.train.setup import (
        DTYPES as DTYPES,
        PATIENCE_S as PATIENCE_S,
        Announced as Announced,
        Rank as Rank,
        be_deterministic as be_deterministic,
        make_context as make_context,
        message_ctas as message_ctas,
        name_of_rows as name_of_rows,
        resolve_pipeline as resolve_pipeline,
        resolve_shape as resolve_shape,
    )
    from phalanx.train.step import (
        ReducedStep as ReducedStep,
        StepParts as StepParts,
        StepResult as StepResult,
        commit_step as commit_step,
        publish as publish,
        reduce_step as reduce_step,
        train_step as train_step,
    )
    from phalanx.train.step_hook import NOWHERE as NOWHERE, NewPlacement as NewPlacement, Where as Where
    from phalanx.train.sync import (
        SyncPlan as SyncPlan,
        check_sync as check_sync,
        finish_sync as finish_sync,
        plan_sync as plan_sync,
        run_sync as run_sync,
    )
    from phalanx.train.warm import warm_kernels as warm_kernels
else:
    __getattr__ = lazy(__name__)
