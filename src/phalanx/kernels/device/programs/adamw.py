"""AdamW over many runs of elements in one launch.

Legend: B elements that a program takes at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw(
    master, exp_avg, exp_avg_sq, grad, out, scale, runs, num_runs, start, size,
    step_size, decay, first_share, second_share, root_correction, eps, seed,
    HAS_RUNS: tl.constexpr, ROUNDS: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of `grad`,). `grad` belongs to the elements `[start, start + size)` of the state.

    `runs` (num_runs, 4), ascending: first element, end, whether weights decay, place in `out` less place in the state. What lies between runs stays as it is.
    Without runs (`HAS_RUNS`) all of it is one, which decays.
    """
    if SCALE_IN_MEMORY:
        factor = tl.load(scale).to(tl.float32)
    else:
        factor = scale
    done = tl.program_id(0).to(tl.int64) * BLOCK
    first = start + done
    end = first + tl.minimum(BLOCK, size - done)
    if HAS_RUNS:
        run = tl.full((), 0, tl.int32)
        high = run + num_runs
        while run < high:  # to the first run that ends behind `first`
            middle = (run + high) // 2
            ends_behind = tl.load(runs + middle * 4 + 1) > first
            high = tl.where(ends_behind, middle, high)
            run = tl.where(ends_behind, run, middle + 1)
        lower = tl.load(runs + run * 4, mask=run < num_runs, other=end)
        while lower < end:
            upper = tl.minimum(tl.load(runs + run * 4 + 1), end)
            decay_here = decay * tl.load(runs + run * 4 + 2).to(tl.float32)
            shift = tl.load(runs + run * 4 + 3)
            update(
                master, exp_avg, exp_avg_sq, grad, out, factor, first, lower, upper, start, shift,
                step_size, decay_here, first_share, second_share, root_correction, eps, seed, ROUNDS, BLOCK,
            )  # fmt: skip
            run += 1
            lower = tl.load(runs + run * 4, mask=run < num_runs, other=end)
    else:
        update(
            master, exp_avg, exp_avg_sq, grad, out, factor, first, first, end, start, 0,
            step_size, decay, first_share, second_share, root_correction, eps, seed, ROUNDS, BLOCK,
        )  # fmt: skip


@triton.jit
def scattered(bits_B):
    """`narrow_moments._hash`."""
    bits_B = bits_B ^ ((bits_B >> 16) & 0xFFFF)
    bits_B = bits_B * -0x7A143595
    bits_B = bits_B ^ ((bits_B >> 13) & 0x7FFFF)
    bits_B = bits_B * -0x3D4D51CB
    return bits_B ^ ((bits_B >> 16) & 0xFFFF)


@triton.jit
def narrowed(x_B, salt_B, seed):
    """`narrow_moments.rounded`: fp32 numbers of which bf16 has room for all bits that are left."""
    bits_B = x_B.to(tl.int32, bitcast=True)
    drawn_B = scattered(bits_B ^ scattered(salt_B.to(tl.int32, bitcast=True) ^ seed))
    found_B = ((bits_B + (drawn_B & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(x_B == x_B, found_B, x_B)


@triton.jit
def update(
    master, exp_avg, exp_avg_sq, grad, out, factor, first, lower, upper, start, shift,
    step_size, decay, first_share, second_share, root_correction, eps, seed,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements `[lower, upper)` of the block that begins at `first`."""
    at_B = first + tl.arange(0, BLOCK)
    here_B = (at_B >= lower) & (at_B < upper)
    g_B = tl.load(grad + (at_B - start), mask=here_B, other=0.0).to(tl.float32) * factor
    x_B = tl.load(master + at_B, mask=here_B, other=0.0)
    m_B = tl.load(exp_avg + at_B, mask=here_B, other=0.0).to(tl.float32)
    v_B = tl.load(exp_avg_sq + at_B, mask=here_B, other=0.0).to(tl.float32)
    m_B += first_share * (g_B - m_B)
    v_B += second_share * (g_B * g_B - v_B)
    x_B = x_B - decay * x_B - step_size * (m_B / (tl.sqrt(v_B) * root_correction + eps))
    tl.store(master + at_B, x_B, mask=here_B)
    if exp_avg.dtype.element_ty == tl.bfloat16:
        m_B = narrowed(m_B, x_B, seed)
        v_B = narrowed(v_B, x_B, seed)
    tl.store(exp_avg + at_B, m_B.to(exp_avg.dtype.element_ty), mask=here_B)
    tl.store(exp_avg_sq + at_B, v_B.to(exp_avg_sq.dtype.element_ty), mask=here_B)
    if ROUNDS:
        tl.store(out + (at_B + shift), x_B.to(out.dtype.element_ty), mask=here_B)
