"""Where control groups for processor time are made and what is written into them, in folders that stand for the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx_lab.testbed import cpu_groups
from phalanx_lab.testbed.cpu_groups import CpuGroups, tops

pytestmark = pytest.mark.unit


def test_version_1_is_looked_for_in_the_own_group_first(tmp_path: Path) -> None:
    (tmp_path / "cpu,cpuacct" / "job").mkdir(parents=True)
    own = "4:memory:/other\n1:cpu,cpuacct:/job\n0::/\n"
    assert tops(tmp_path, own) == [tmp_path / "cpu,cpuacct" / "job", tmp_path / "cpu,cpuacct"]


def test_in_a_container_the_own_group_is_the_top(tmp_path: Path) -> None:
    """Its path is that of the machine outside, which is not to be seen here."""
    (tmp_path / "cpu").mkdir()
    assert tops(tmp_path, "1:cpu:/docker/abc\n") == [tmp_path / "cpu"]


def test_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    assert tops(tmp_path, "0::/\n") == [tmp_path]
    assert tops(tmp_path / "none", "0::/\n") == []


@pytest.mark.parametrize("quota", [None, 0.25])
def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: float | None) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    groups = CpuGroups("bed", 2, quota_cores=quota, top=tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    written = "cpu.weight" if quota is None else "cpu.max"
    assert [(group.name, (group / written).read_text()) for group in groups.groups] == [
        (f"bed-{i}", "100" if quota is None else "2500 10000") for i in range(2)
    ]
    groups.place(1, 77)
    assert (tmp_path / "bed-1" / "cgroup.procs").read_text() == "77"
    monkeypatch.setattr(cpu_groups, "EMPTY_S", 0.0)
    groups.close()  # a folder with files stays, as a group with processes does
    assert [group.name for group in groups.groups] == ["bed-0", "bed-1"]


def test_a_refusal_names_its_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        CpuGroups("bed", 1, top=tmp_path / "not there")
