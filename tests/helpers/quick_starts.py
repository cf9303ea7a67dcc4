"""Imported by the server from which runs are forked (`train_help.py`), so that a rank of a test begins with what the test is about.

TorchScript compiles here once what each rank would compile in its first step (0.5 s of processor), and the rate of the processor, which a run's utilisation is
measured against, is that of a smaller product for a shorter time (0.6 to 1.2 s of processor for each rank otherwise).
"""

from __future__ import annotations

from phalanx.kernels.cpu import expert_pieces
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.ops import attention, cross_entropy, norm, rope, square_sum
from phalanx.train.setup import machine

machine.RATE_SIZES, machine.RATE_SECONDS = (256,), 0.02

for function in (
    attention._backward_heads,
    cross_entropy._losses_of_chunk,
    expert_pieces.forward_piece,
    expert_pieces.backward_piece,
    norm._forward_rows,
    norm._backward_rows,
    rope._turn_rows,
    square_sum._in_chunks,
):
    scripted(function)
