"""What the data tests share: streams made by hand, corpora on disk, processes that prepare and may be killed."""

import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

from phalanx.data.dataset import Dataset
from phalanx.data.packing import TokenStream

EOS = 0


def make_stream(documents, *, bare=(), gap=0):
    """A stream of `documents` (lists of ids without EOS); those numbered in `bare` have no EOS in the file; `gap` foreign tokens between."""
    tokens, begin, lengths = [], [], []
    for i, document in enumerate(documents):
        tokens += [999] * gap
        begin.append(len(tokens))
        tokens += document if i in bare else [*document, EOS]
        lengths.append(len(document) + 1)
    return TokenStream(
        tokens=np.array([*tokens, 999], np.uint16),
        begin=np.array(begin, np.int64),
        offset=np.append(0, np.cumsum(lengths)).astype(np.int64),
        bare=np.isin(np.arange(len(documents)), bare) if len(bare) else None,
        eos_id=EOS,
    )


def make_dataset(*pools, weights=None, fingerprint="f"):
    """A data set whose pools are given as lists of streams."""
    weights = weights or (1.0,) * len(pools)
    return Dataset(
        name="train",
        pools=tuple(map(tuple, pools)),
        weights=weights,
        fingerprint=fingerprint,
        vocab_size=1000,
        eos_id=EOS,
    )


def counting_stream(num_windows, seq_len, *, first=1):
    """One long document whose tokens are distinct, cut into exactly `num_windows` windows."""
    length = num_windows * seq_len
    return make_stream([[first + i for i in range(length)]])


def write_megatron(prefix: Path, documents, *, dtype="<u2", code=8, document_index=True, sentences=1, modes=False):
    """A Megatron pair; each document is cut into `sentences` sequences."""
    flat = [t for d in documents for t in d]
    prefix.with_suffix(".bin").write_bytes(np.array(flat, dtype).tobytes())
    lengths, starts = [], [0]
    for document in documents:
        lengths += [len(c) for c in np.array_split(document, sentences)]
        starts.append(len(lengths))
    pointers = (np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize) if lengths else []
    head = struct.pack("<9sQBQ", b"MMIDIDX\x00\x00", 1, code, len(lengths))
    body = np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    if document_index:
        head += struct.pack("<Q", len(starts))
        body += np.array(starts, "<i8").tobytes()
    if modes:
        body += np.zeros(len(lengths), np.int8).tobytes()
    prefix.with_suffix(".idx").write_bytes(head + body)


def stream_documents(stream: TokenStream):
    """The documents of a stream as lists, EOS included."""
    from phalanx.data.packing import gather

    tokens = gather(stream, np.arange(stream.num_tokens))[0].tolist()
    bounds = stream.offset.tolist()
    return [tokens[a:b] for a, b in itertools.pairwise(bounds)]


def decoded(prepared):
    """All texts of a prepared data set, sorted; EOS checked and taken off."""
    texts = []
    for side in (prepared.train, prepared.validation):
        for stream in (s for pool in side.pools for s in pool):
            for document in stream_documents(stream):
                assert document[-1] == prepared.tokenizer.eos_id
                texts.append(prepared.tokenizer.decode(document[:-1]))
    return sorted(texts)


_CHILD = """
import json, os, signal, sys, time
from phalanx.core.config import DataConfig
from phalanx.core.errors import PhalanxError
from phalanx.data.preparation import prepare
job = json.loads(sys.argv[1])
seen = []
def progress(phase, done, total):
    if phase not in seen:
        seen.append(phase)
        print("phase", phase, flush=True)
    if phase == job["kill_in"] and done >= total // 2:
        print("about to die", flush=True)
        while job["wait_for"] and not os.path.exists(job["wait_for"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
if job["file_limit"]:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"],) * 2)
try:
    p = prepare(DataConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in job["config"].items()}), progress=progress)
except PhalanxError as error:
    print(error)
    sys.exit(2)
print(json.dumps({"fingerprint": p.fingerprint, "reused": p.reused, "phases": seen, "tokens": p.train.num_tokens}))
"""


def start_prepare(
    config: dict, *, kill_in: str = "", wait_for: Path | None = None, file_limit: int = 0
) -> subprocess.Popen:
    """A process that prepares `config`, and kills itself with SIGKILL half way through the phase `kill_in`, once `wait_for` exists."""
    wait = str(wait_for) if wait_for else ""
    job = json.dumps({"config": config, "kill_in": kill_in, "wait_for": wait, "file_limit": file_limit})
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_line(process: subprocess.Popen, line: str) -> None:
    """Reads what the process prints up to `line`."""
    for printed in process.stdout:
        if printed.strip() == line:
            return
    raise AssertionError(f"the process ended without printing {line!r}: {process.stderr.read()}")


def finish(process: subprocess.Popen, *, timeout_s: float = 60) -> tuple[int, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out + err
