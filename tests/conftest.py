"""What holds for every test: one compute thread, so that tests, forked ranks and lanes share two cores without waiting for each other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
