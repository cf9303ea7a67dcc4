"""Where in Phalanx an operation comes from: the line that asked for it, and the phase of a step that the line belongs to.

Phases are read off the Python stack, innermost first, so that nothing of the product has to be wrapped. Autograd runs backward passes in the thread that asked for
them (`child.py` sees to it), so their operations have a stack too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import phalanx

HOME = str(Path(phalanx.__file__).parent) + "/"
FILES = {
    "kernels/ops/cross_entropy.py": "loss",
    "train/step/optim.py": "optimizer",
    "train/step/vote.py": "vote",
}
"""File -> phase of everything that it asks for."""
PASSES = {"forward": "forward", "backward": "backward", "input_gradient": "backward", "weight_gradient": "backward"}
"""Methods of a pass -> phase."""
FUNCTIONS = {
    **{("train/step/passes.py", name): phase for name, phase in PASSES.items()},
    ("runtime/state/gradients.py", "reduce"): "reduce",
    ("train/step/transaction.py", "publish"): "publish",
}
"""(file, function) -> phase; a file may be reached from several."""
CONTENTS = (
    ("runtime/state/optimizer.py", "parameters"),
    ("runtime/state/", "gradients"),
    ("train/step/passes.py", "layers"),
    ("runtime/pipeline/", "stages"),
)
"""Beginning of a file -> what goes out there."""


def frames() -> list[FrameType]:
    """Frames of Phalanx on this thread's stack, innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(HOME):
            found.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def line_of(stack: list[FrameType]) -> str:
    """`file:line` of the innermost of them, the file relative to the package; "?" where there is none."""
    return f"{stack[0].f_code.co_filename[len(HOME) :]}:{stack[0].f_lineno}" if stack else "?"


def phase_of(stack: list[FrameType]) -> str:
    """The phase of a step; `step` for what is around them."""
    for frame in stack:
        file = frame.f_code.co_filename[len(HOME) :]
        phase = FILES.get(file) or FUNCTIONS.get((file, frame.f_code.co_name))
        if phase is not None:
            return phase
    return "step"


def content_of(stack: list[FrameType], op: str) -> str:
    """What a collective or message carries: `gradients`, `parameters`, what crosses between `stages`, of `layers` their `rows` apart (all-to-alls and messages: of experts, and of context parallelism, which backward nothing tells apart), or the `rest`."""
    for frame in stack:
        file = frame.f_code.co_filename[len(HOME) :]
        content = next((what for start, what in CONTENTS if file.startswith(start)), None)
        if content is not None:
            return "rows" if content == "layers" and op in ("alltoall_base", "send", "recv") else content
    return "rest"


def local(stack: list[FrameType], file: str, function: str, name: str) -> object:
    """A local variable of the innermost frame of that function; None where it is not on the stack."""
    for frame in stack:
        if frame.f_code.co_name == function and frame.f_code.co_filename[len(HOME) :] == file:
            return frame.f_locals.get(name)
    return None
