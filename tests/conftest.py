"""What holds for every test: one compute thread, so that tests, forked ranks and lanes share two cores without waiting for each other."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# A machine that is busy beside the tests draws examples slowly; that says nothing about them.
settings.register_profile("phalanx", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("phalanx")

# Before anything imports Triton: its kernels run in its interpreter here. TRITON_INTERPRET=0 with a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


# A shell starts what it runs beside itself (scripts/tests.sh) with Ctrl-C ignored, and programs that tests start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
