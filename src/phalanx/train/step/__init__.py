"""One optimizer step, as a transaction: passes over micro-batches, the loss, reduced gradients, the vote, the update (`transaction.py` has their order).

The room decides when parameters and moments may change, what is counted and who may veto. Most of its names are what others hold in their hands: `StepParts` is all that a step needs,
`ReducedStep` stands between the vote and the update, `StepResult` is what a step leaves; `reduce_step`, `commit_step` and `publish` are the parts of `train_step`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.step.check import check_saved as check_saved
    from phalanx.train.step.exact import ExactSums as ExactSums, exact_sums as exact_sums
    from phalanx.train.step.optim import (
        AdamW as AdamW,
        Optimizer as Optimizer,
        State as State,
        learning_rate as learning_rate,
    )
    from phalanx.train.step.parts import StepParts as StepParts
    from phalanx.train.step.passes import StageRunner as StageRunner, choose_measured as choose_measured
    from phalanx.train.step.transaction import (
        ReducedStep as ReducedStep,
        StepResult as StepResult,
        commit_step as commit_step,
        eval_loss as eval_loss,
        publish as publish,
        reduce_step as reduce_step,
        train_step as train_step,
    )
    from phalanx.train.step.vote import ENTROPY_BITS as ENTROPY_BITS, LOSS_BITS as LOSS_BITS
    from phalanx.train.step.warmup import (
        PassTimes as PassTimes,
        measures_warmup as measures_warmup,
        with_none_ahead as with_none_ahead,
    )
else:
    __getattr__ = lazy(__name__)
