"""Second product of a MoE layer by blocks of columns, and sending of each block while the next is computed; adding up at the owner; sending of entries.

Two roles in one kernel (arXiv 2502.19811, section 3.2: separate thread blocks, because a remote store at the end of a tile would stall the next one). The
first `compute_programs` programs compute tiles, block by block over all experts; the others take tasks (block, peer, chunk of entries) in that order, wait
until the block is there, add the copies of each entry in the order of the slots, and store the sum into the peer's buffer. Programs that have
computed help, if `first_sender` is 0. The last program of (block, peer) raises the peer's flag. No data is added by atomics, so bits do not depend on who did what.

All programs must be resident at once (at most one for each multiprocessor): tasks wait for tiles of other programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.triton.programs.flags import count_done, raise_flag, wait_count, wait_flags
from phalanx.kernels.triton.programs.product import product_tile, sum_rows


@triton.jit
def compute_tiles(
    h, h_stride, w, w_slot_stride, w_col_stride, w_depth_stride, y, y_stride, problems, num_problems, tiles_done,
    program, programs, depth, columns, block_columns, blocks,
    ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    BY_DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Tiles of this program: all problems of block 0, then of block 1, ..."""
    tiles_of_problem = ROW_TILES * tl.cdiv(block_columns, BLOCK_N)
    tiles_of_block = tl.load(num_problems) * tiles_of_problem
    for tile in range(program, tiles_of_block * blocks, programs):
        block = tile // tiles_of_block
        in_block = tile % tiles_of_block
        problem = problems + (in_block // tiles_of_problem) * 4
        slot = tl.load(problem)
        first = tl.load(problem + 1)
        rows = tl.load(problem + 2)
        row0 = (in_block % ROW_TILES) * BLOCK_M
        if row0 < rows:
            row_M = row0 + tl.arange(0, BLOCK_M)
            first_col = block * block_columns
            col_N = first_col + (in_block % tiles_of_problem) // ROW_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
            last_col = tl.minimum(first_col + block_columns, columns)
            w_slot = w + slot.to(tl.int64) * w_slot_stride
            total_MN = product_tile(
                h, first + tl.minimum(row_M, rows - 1), h_stride,
                w_slot, col_N, last_col, w_col_stride, w_depth_stride, depth,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, BY_DEPTH, WIDEN,
            )  # fmt: skip
            y_ptrs = y + (first + row_M).to(tl.int64)[:, None] * y_stride + col_N[None, :]
            tl.store(
                y_ptrs, total_MN.to(y.dtype.element_ty), mask=(row_M < rows)[:, None] & (col_N < last_col)[None, :]
            )
        count_done(tiles_done + block)


@triton.jit
def send_sums(
    source, source_stride, index, copies, counts, buffer_table, buffer_stride, entry, chunk_end, peer, rank, capacity,
    first_col, last_col,
    COPIES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum and store entries `entry..chunk_end` of `peer`, columns `first_col..last_col`, at this rank's place in the peer's buffer."""
    buffer = tl.multiple_of(tl.load(buffer_table + peer).to(tl.pointer_type(source.dtype.element_ty)), 16)
    last_entry = tl.minimum(chunk_end, tl.load(counts + peer))
    while entry < last_entry:
        entry_E = entry + tl.arange(0, BLOCK_E)
        is_entry_E = entry_E < last_entry
        for start in range(first_col, last_col, BLOCK_C):
            col_C = start + tl.arange(0, BLOCK_C)
            is_col_C = col_C < last_col
            total = sum_rows(
                source, source_stride, index + peer.to(tl.int64) * capacity * copies, copies,
                entry_E, is_entry_E, col_C, is_col_C, COPIES, BLOCK_E, BLOCK_C,
            )  # fmt: skip
            place_E = (rank * capacity + entry_E).to(tl.int64)
            ptrs = buffer + place_E[:, None] * buffer_stride + col_C[None, :]
            tl.store(ptrs, total.to(source.dtype.element_ty), mask=is_entry_E[:, None] & is_col_C[None, :])
        entry += BLOCK_E


@triton.jit
def second_kernel(
    h, h_stride, w, w_slot_stride, w_col_stride, w_depth_stride, y, y_stride, problems, num_problems,
    row_of_copy, copies, counts, buffer_table, buffer_stride, flag_table, epoch_at,
    tiles_done, sent, next_task, patience, status,
    rank, ranks, capacity, chunks, depth, columns, block_columns, blocks, compute_programs, first_sender,
    ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    BY_DEPTH: tl.constexpr, WIDEN: tl.constexpr,
    COPIES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`y = h @ w[slot].T`, then for each source's entry the sum of its copies into that source's buffer, block by block."""
    program = tl.program_id(0)
    if program < compute_programs:
        compute_tiles(
            h, h_stride, w, w_slot_stride, w_col_stride, w_depth_stride, y, y_stride, problems, num_problems,
            tiles_done, program, compute_programs, depth, columns, block_columns, blocks,
            ROW_TILES, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, BY_DEPTH, WIDEN,
        )  # fmt: skip
    if program >= first_sender:
        epoch = tl.load(epoch_at)
        tiles_of_block = tl.load(num_problems) * ROW_TILES * tl.cdiv(block_columns, BLOCK_N)
        tasks_of_block = ranks * chunks
        task = tl.atomic_add(next_task, 1, sem="relaxed", scope="gpu")
        while task < blocks * tasks_of_block:
            block = task // tasks_of_block
            # The own entries, which need no link, come last.
            peer = (rank + 1 + task % tasks_of_block // chunks) % ranks
            entry = task % chunks * CHUNK
            wait_count(tiles_done + block, tiles_of_block, patience, status)
            first_col = block * block_columns
            send_sums(
                y, y_stride, row_of_copy, copies, counts, buffer_table, buffer_stride,
                entry, entry + CHUNK, peer, rank, capacity,
                first_col, tl.minimum(first_col + block_columns, columns), COPIES, BLOCK_E, BLOCK_C,
            )  # fmt: skip
            if count_done(sent + block * ranks + peer) == chunks - 1:
                raise_flag(flag_table, peer, rank * blocks + block, epoch)
            task = tl.atomic_add(next_task, 1, sem="relaxed", scope="gpu")


@triton.jit
def send_kernel(
    x, x_stride, token_of_entry, counts, buffer_table, buffer_stride, flag_table, epoch_at, sent,
    rank, ranks, capacity, parts, part_places, chunks, columns,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Tokens to the ranks that need them, each part's flag behind it."""
    epoch = tl.load(epoch_at)
    for task in range(tl.program_id(0), ranks * parts * chunks, tl.num_programs(0)):
        # In the order of the flags at the receivers. The one that expects this rank `stage` steps around its ring is `stage` steps back.
        stage = task // (parts * chunks)
        part = task // chunks % parts
        peer = (rank - stage + ranks) % ranks
        entry = part * part_places + task % chunks * CHUNK
        part_end = tl.minimum((part + 1) * part_places, capacity)
        send_sums(
            x, x_stride, token_of_entry, 1, counts, buffer_table, buffer_stride,
            entry, tl.minimum(entry + CHUNK, part_end), peer, rank, capacity, 0, columns, 1, BLOCK_E, BLOCK_C,
        )  # fmt: skip
        if count_done(sent + peer * parts + part) == chunks - 1:
            raise_flag(flag_table, peer, stage * parts + part, epoch)


@triton.jit
def add_ranks_kernel(
    buffer, buffer_stride, entry_of_token, out, out_stride, flags, epoch_at, patience, status,
    ranks, num_tokens, columns, block_columns, blocks,
    RANKS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`out[t]` = sum over ranks, in their order, of the partial sums of token t. `entry_of_token` (T, P) holds places in `buffer`, -1 for none."""
    epoch = tl.load(epoch_at)
    programs = tl.num_programs(0)
    token_blocks = tl.cdiv(num_tokens, BLOCK_E)
    ready = -1
    for task in range(tl.program_id(0), token_blocks * blocks, programs):
        block = task // token_blocks
        if block > ready:
            for peer in range(ranks):
                wait_flags(flags, peer * blocks + block, peer * blocks + block + 1, epoch, patience, status)
            ready = block
        token_E = task % token_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
        is_token_E = token_E < num_tokens
        last_col = tl.minimum((block + 1) * block_columns, columns)
        for start in range(block * block_columns, last_col, BLOCK_C):
            col_C = start + tl.arange(0, BLOCK_C)
            total = sum_rows(
                buffer, buffer_stride, entry_of_token, ranks, token_E, is_token_E, col_C, col_C < last_col,
                RANKS, BLOCK_E, BLOCK_C,
            )  # fmt: skip
            ptrs = out + token_E.to(tl.int64)[:, None] * out_stride + col_C[None, :]
            tl.store(ptrs, total.to(out.dtype.element_ty), mask=is_token_E[:, None] & (col_C < last_col)[None, :])
    # No rank may be a call behind when this one goes on, not even for a rank without tokens (see the end of first_kernel).
    wait_flags(flags, 0, ranks * blocks, epoch, patience, status)
