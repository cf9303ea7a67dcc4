"""Facts of kernels and of the machine that the memory estimate rests on: what is mirrored from code, and what was measured.

Mirrored: block sizes and paddings of `kernels/`, which `simulate` may not import. tests/ranks/test_memory_terms.py compares each with its original.

Measured: memory that no tensor of ours holds. Each constant is per rank (or per piece of generated code) and says where it comes from;
none depends on a model's shape. Measured with torch 2.13 (oneDNN, gloo) and glibc 2.36 on x86-64 with AMX, and where it says so on a Cascade Lake,
which has AVX-512 without bf16; `phalanx bench memory` measures anew.
"""

from __future__ import annotations

MIB = 1 << 20

# ---- mirrored from kernels/ and train/ -----------------------------------------------------------------------------------------

SPACE = 32
"""`shapes.SPACE`: elements between the rows of a scratch matrix."""
BLOCK = 1 << 18
"""`shapes.BLOCK`: elements of a block of an elementwise kernel."""
LOGIT_CHUNK = 512
"""`cross_entropy.CHUNK`: tokens of one product with the vocabulary."""
LOGIT_GROUP_BYTES = 64 << 20
"""`cross_entropy.GROUP_BYTES`: logits that exist at once (at least one chunk)."""
LOGIT_COLUMNS = 512
"""`cross_entropy.COLUMNS`: rows of the head's gradient that are one piece of work."""
MAX_PIECE = 2048
"""`grouped.MAX_PIECE`: rows of an expert in one piece of work."""
BLOCK_ROWS = 256
"""`grouped.BLOCK_ROWS`: rows of an elementwise pass inside a piece."""
KEY_BLOCK = 256
"""`attention.KEY_BLOCK`: keys of a block of the backward pass."""
MAX_QUERIES = 2048
"""`block_attention.MAX_QUERIES`: queries of one strip."""
LEAST_OPEN = 4
"""`boundary.LEAST_OPEN`: sends of a pipeline that may always be under way."""
CORRECTION = 16
"""`attention.CORRECTION`: columns added to queries and keys."""
GRADIENT_ROOMS = 2
"""`GradientBuffers` with `optim.zero = 2`: buffers of a family that are alive at once, where every pass makes all gradients in order: one is filled, one reduced."""
ADAM_CHUNK = 1 << 18
"""`adamw.CHUNK`: elements that the optimizer widens at once, in each lane."""
PREFETCH_STEPS = 2
"""`train.loop.PREFETCH_STEPS`: steps whose batches are loaded ahead."""
SAMPLE_TOKENS, PROMPT_TOKENS = 80, 12
"""`train.loop.SAMPLE_TOKENS`, `PROMPT_TOKENS`: the text that a run ends with."""
LONGEST_WARM = 512
"""`warm.LONGEST`: documents up to this length have their code generated at the start."""
RATE_SIZES = (1024, 2048, 4096)
"""`machine.RATE_SIZES`: square products by which a run measures the machine; the largest only where it is quick, as bf16 is with AMX."""
LARGEST_HEAP_BLOCK = 32 << 20
"""`allocator.LARGEST_HEAP_BLOCK`: from here on a block is mapped by itself, given back when it is freed, and makes no holes."""


def padded_rows(num_rows: int, item_bytes: int) -> int:
    """`shapes.padded_rows`: row counts of 16-bit products are rounded up to four significant bits, at least 16."""
    if item_bytes != 2 or num_rows == 0:
        return num_rows
    step = max(16, 1 << max(0, num_rows.bit_length() - 4))
    return -(-num_rows // step) * step


def pieces(num_rows: int, item_bytes: int) -> tuple[int, int]:
    """(pieces of a slot of `num_rows` rows, padded rows of the largest)."""
    num = -(-num_rows // MAX_PIECE)
    return num, padded_rows(-(-num_rows // num), item_bytes) if num else 0


# ---- measured ----------------------------------------------------------------------------------------------------------------------

LIBRARY_BYTES = 29 * MIB
"""Pages of libtorch that a run of fp32 touches, beyond those that importing it and joining the world did (smaps)."""
GENERATOR_BYTES = 9 * MIB
"""Pages of oneDNN that a run of bf16 touches besides: what generates code (smaps)."""
INTERPRETER_BYTES = 10 * MIB
"""Objects of Python and of the libraries behind the run: tokenizer, event sinks, checkpoint planner, modules (mallinfo2 and smaps of a run
of `tiny`, whose tensors take 2 MiB, before its first step)."""
SCRIPT_BYTES = 10 * MIB
"""What TorchScript makes of the functions of `kernels/cpu/scripted.py` and of their first calls (the same run, over its first step)."""
RECOMPUTE_BYTES = 140 * MIB
"""`torch.utils.checkpoint` imports `torch._dynamo` with its first call, 880 modules (torch 2.13; resident memory of a process that has imported the trainer: 267 MiB, and
412 after one call)."""
MOST_REARRANGED = 12 * MIB
"""Products of fp32 and fp64 are MKL's, which rearranges an operand first and keeps the room for it: as large as the operand, up to this (products of
512 rows with 128 to 1024 inputs and 2048 to 16384 outputs, one by one in fresh processes: 2.4 MiB for 2, 8.4 for 8, 12.6 for 12, 8.4 to 12.6 beyond)."""
PRODUCT_BYTES = int(0.5 * MIB)
"""Heap of one generated bf16 product: oneDNN keeps a table of 544 KiB per shape, whatever the shape, the executable code beside it."""
PRODUCT_CODE_BYTES = int(0.07 * MIB)
"""Executable pages of one generated product."""
NOTED_PRODUCT_BYTES = int(0.038 * MIB)
"""Heap of a bf16 product whose code is there already (`gemm:jit:bf16` in oneDNN's words, on processors that do not multiply bf16): what oneDNN notes
about its shape (mallinfo2 around products of 200 and of 600 row counts and of 100 widths, on a Cascade Lake: 38.5, 38.7 and 38.1 KiB each)."""
ATTENTION_BYTES = int(0.09 * MIB)
"""Heap of torch's attention kernel for one document length."""
ATTENTION_CODE_BYTES = int(0.02 * MIB)
ATTENTION_LENGTHS = 1170
"""Length from which on torch's attention finds code that it has generated for shorter ones."""
MAX_PRODUCTS = 1024
"""oneDNN's cache of generated products."""
PREPARE_BYTES = 330 * MIB
"""What the first rank of a host needs to train a BPE on its sample and to tokenise, once."""
FAULT_BYTES = 64 << 10
"""Pages that Linux maps around one that is read."""
HOLES = 0.3
"""Heap that lies idle between the tensors of a step, as a share of their bytes. glibc cannot reuse a freed block of exactly the right size
(an aligned block needs 96 bytes more to be found), so that a step's tensors spread until holes have formed that are large enough. Measured
with mallinfo2 at each of 60 steps of the default run, over what routing gave each rank: 0.24 to 0.35 until the first checkpoint is
staged, up to 0.5 behind it. That is with GLIBC_TUNABLES=glibc.malloc.tcache_count=0, as `phalanx train` and `phalanx bench` start themselves; without, it is more."""
