"""Addresses, and the `ip` and `tc` batches that make, shape, cut and remove the links of a bed.

Pure: text in, text out. Every bed has network namespaces of its own, so all beds use the same subnet and interface names without
meeting. Each host's link is a veth pair with a token bucket (`tbf`) on both ends: the host's end shapes what it sends, the switch's end what
it receives. Traffic of a host to itself never leaves its loopback device and is not shaped.

Why the numbers of `shape` (measured at 1 Gbit/s on a 2-core machine; fastest of 15 messages after a pause, wire time in brackets): a bucket
lets `burst` bytes pass at once. With 128 kB and segments of 64 kB a message of 64 kB takes 0.03 ms (0.55) and one of 128 kB 0.15 ms (1.10).
With segments of 16 kB a bucket of 37 kB gives 0.33 and 0.95 ms, 75 kB 0.10 and 0.61 ms; from 256 kB on both are within 5 %. Smaller
buckets lose more when a busy machine serves the timer late: one stream beside four busy loops carried 0.93 Gbit/s with 256 kB, 0.91 with
38 kB (0.956 is perfect). Hence 130 us segments and a bucket of 400 us (`FINE`). `peakrate` would pace the burst too, but it cuts every segment to
packets and leaves 0.38 Gbit/s.

A segment costs a processor the same whatever its size. Where messages have megabytes and programs compute beside them on the same cores, the
emulation itself then takes what no network card would take: at 380 Mbit/s 12.5 MiB cost a rank 110 ms of processor with segments of 130 us,
60 with 340 us, 35 with 700 us, 20 with 1.4 ms (`phalanx bench layer`). Hence `COARSE`.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import Problem
from phalanx_lab.testbed.cluster import ClusterSpec

INTERFACE = "eth0"
"""Name of a host's link inside the host."""
MAX_HOSTS = 250
_BRIDGE = "switch"
_QUEUE_S = 10e-3
_NOWHERE = "192.0.2.0/24"
"""A network for examples (RFC 5737)."""
_MIN_SEGMENT, _MAX_SEGMENT = 3_000, 65_536
_MIN_QUEUE = 128_000
MIN_RATE, MAX_RATE = 1e5, 1e12


@dataclass(frozen=True)
class Grain:
    """How fine a link's time is."""

    segment_s: float
    """Seconds of one piece that the kernel hands to the link, at the link's rate."""
    burst_s: float
    """What an idle link lets pass at once."""


FINE = Grain(130e-6, 400e-6)
"""Messages of 64 kB take the time they should."""
COARSE = Grain(1e-3, 2e-3)
"""Setting for messages of a megabyte and more, where processors are scarce."""


def address(host: int) -> str:
    return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"


def host_name(host: int) -> str:
    return f"host{host}"


def hosts_file(spec: ClusterSpec) -> str:
    """What stands in /etc/hosts of every host."""
    lines = [f"{address(h)} {host_name(h)}" for h in range(spec.hosts)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def link_problems(spec: ClusterSpec) -> list[Problem]:
    """What the testbed cannot build of a legal cluster."""
    problems = []
    if spec.hosts > MAX_HOSTS:
        rule = f"the testbed has addresses for {MAX_HOSTS} hosts"
        problems.append(Problem(where="cluster.hosts", value=spec.hosts, rule=rule, hint=f"use {MAX_HOSTS}"))
    rate = spec.link_bit_per_s
    if rate is not None and not MIN_RATE <= rate <= MAX_RATE:
        rule = "the testbed shapes links from 100 kbit/s to 1 Tbit/s"
        problems.append(Problem(where="cluster.link_bit_per_s", value=rate, rule=rule, hint="use 1e9, or None"))
    for name, neutral in (("inside_bit_per_s", None), ("inside_latency_s", 0.0)):
        if getattr(spec, name) != neutral:
            rule = "has no effect on the testbed, where the inside of a host is its loopback device"
            hint = f"leave it at {neutral}"
            problems.append(Problem(where=f"cluster.{name}", value=getattr(spec, name), rule=rule, hint=hint))
    return problems


def port(host: int) -> str:
    """Name of a host's link at the switch."""
    return f"port{host}"


def segment_bytes(rate: float | None, grain: Grain = FINE) -> int:
    """Largest piece in which the kernel hands data to a link of this rate."""
    if rate is None:
        return _MAX_SEGMENT
    return int(min(max(rate / 8 * grain.segment_s, _MIN_SEGMENT), _MAX_SEGMENT))


def make_switch() -> str:
    """ip batch, at the switch."""
    return f"""\
link set lo up
link add {_BRIDGE} type bridge
link set {_BRIDGE} up
"""


def plug_in(host: int, *, pid: int, rate: float | None, grain: Grain = FINE) -> str:
    """ip batch, at the switch: a link to the host whose first process is `pid`."""
    return f"""\
link add {port(host)} type veth peer name {INTERFACE} netns {pid}
link set {port(host)} gso_max_size {segment_bytes(rate, grain)} master {_BRIDGE}
link set {port(host)} up
"""


def configure(host: int, *, rate: float | None, grain: Grain = FINE) -> str:
    """ip batch, in the host."""
    return f"""\
link set lo up
addr add {address(host)}/16 dev {INTERFACE}
link set {INTERFACE} gso_max_size {segment_bytes(rate, grain)}
link set {INTERFACE} up
"""


def unplug(host: int) -> str:
    """ip batch, at the switch: the link and what is queued on it are gone at once."""
    return f"link del {port(host)}\n"


def set_link(host: int, *, up: bool) -> str:
    """ip batch, at the switch: pull the cable, or put it back. Both ends keep address and shape."""
    return f"link set {port(host)} {'up' if up else 'down'}\n"


def resize(device: str, *, rate: float | None, grain: Grain = FINE) -> str:
    """ip batch, at either end: the segments that fit a new rate."""
    return f"link set {device} gso_max_size {segment_bytes(rate, grain)}\n"


def forget_routes() -> str:
    """ip batch, in the host: its connections look up their route again, and with it the size of their segments.

    A connection remembers that size; segments larger than a device takes are cut to single packets by the processor.
    """
    return f"route add {_NOWHERE} dev {INTERFACE}\nroute del {_NOWHERE} dev {INTERFACE}\n"


def shape(device: str, *, rate: float | None, latency_s: float, grain: Grain = FINE) -> str:
    """tc batch, at either end of a link. Half of `latency_s` goes to each end, as a packet between hosts passes two links' ends."""
    lines, parent = [], "root handle 1:"
    if latency_s:
        lines.append(f"qdisc replace dev {device} {parent} netem delay {latency_s / 2 * 1e6:.0f}us limit 1000000")
        parent = "parent 1:1 handle 2:"
    if rate is not None:
        burst = max(int(rate / 8 * grain.burst_s), 2 * segment_bytes(rate, grain))
        queue = max(int(rate / 8 * _QUEUE_S), _MIN_QUEUE) + burst
        lines.append(f"qdisc replace dev {device} {parent} tbf rate {rate:.0f}bit burst {burst}b limit {queue}b")
    return "".join(f"{line}\n" for line in lines)


def unshape(device: str) -> str:
    """tc batch, at either end."""
    return f"qdisc del dev {device} root\n"


def block(other: int, *, blocked: bool) -> str:
    """Whether a host throws away what it sends to another one."""
    return f"route {'replace' if blocked else 'del'} blackhole {address(other)}/32\n"
