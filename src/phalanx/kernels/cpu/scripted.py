"""Functions of plain torch operations that run without Python's interpreter lock.

Two lanes that call small operations from Python hand the lock back and forth, which costs several times the operations themselves: 200
products of 16 x 1024 numbers take 1.3 ms in one thread alone, 7.4 ms in each of two, and 1.0 ms in each of two as one scripted function.
So what a lane does with a piece of work is one function, compiled by TorchScript. That takes milliseconds and no compiler of the machine;
nothing is fused, every operation is the one that Python would have called, so the results are the same bits.

Scripted functions take their arguments by position and may have many. They must not call what writes into *lists* of tensors
(`torch._fused_adamw_`): the optimiser of TorchScript does not see such writes and deletes the call.

TorchScript is deprecated (and torch is pinned): where it is gone, the function itself is returned, slower with several lanes, else equal.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def scripted(function: Function) -> Function:
    """`function`, compiled once per process, at first use. Its annotations must be types that TorchScript knows; no keyword defaults."""
    compile_it = getattr(torch.jit, "script", None)
    if compile_it is None:
        return function
    with warnings.catch_warnings():
        for deprecated in (DeprecationWarning, FutureWarning):  # torch 2.14 tells of the second kind
            warnings.simplefilter("ignore", deprecated)
        compiled: Function = compile_it(function)
    return compiled
