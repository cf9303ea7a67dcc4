"""A sender and a receiver on plain sockets, run in a host to measure a link: `python -m phalanx_lab.testbed.probe ...`.

    receive                         port 5201: one stream in, a JSON line with its rate out
    send ADDRESS SECONDS            as fast as the link takes it
    echo                            port 5202: gives back what it gets
    ping ADDRESS COUNT              times small messages there and back

The rate is counted where bytes arrive, in payload bytes: the headers of full-sized packets take 4.4 % of a link, so a perfect 1 Gbit/s
carries 0.956. It is the median over windows of 50 ms, the first `WARM_UP_S` left out: a probe that waits for a processor for a while
says nothing about the link, and the mean would be mostly that on a busy machine. The mean is printed too, and the rate that a tenth of the
windows exceed: inside a host no link limits, so what the probes reach while they have processors is the figure.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import sys
import time

STREAM_PORT, ECHO_PORT = 5201, 5202
WARM_UP_S = 0.3
_WINDOW_S = 0.05
_CHUNK = 1 << 17
_CONNECT_S = 10.0


def _accept(port: int) -> socket.socket:
    with socket.create_server(("0.0.0.0", port)) as server:
        server.settimeout(30)
        connection, _ = server.accept()
    connection.settimeout(30)
    return connection


def _connect(address: str, port: int) -> socket.socket:
    """Waits for the other side to listen."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _receive_some(connection: socket.socket, buffer: bytearray) -> int:
    """Bytes that came, 0 at the end; the sender ends with a reset."""
    try:
        return connection.recv_into(buffer)
    except ConnectionResetError:
        return 0


def receive() -> dict[str, float]:
    """Counts one stream."""
    buffer, rates = bytearray(_CHUNK), []
    with _accept(STREAM_PORT) as connection:
        connection.recv_into(buffer)
        begin = time.monotonic() + WARM_UP_S
        total, counted, start = 0, 0, begin
        while count := _receive_some(connection, buffer):
            now = time.monotonic()
            if now < begin:
                continue
            counted += count
            if now > start + _WINDOW_S:
                rates.append(8 * counted / (now - start))
                total, counted, start = total + counted, 0, now
    if not rates:
        raise RuntimeError("the stream ended before it could be measured")
    best = sorted(rates)[int(0.9 * len(rates))]
    mean = 8 * total / (start - begin)
    return {
        "bit_per_s": statistics.median(rates),
        "best_bit_per_s": best,
        "mean_bit_per_s": mean,
        "windows": len(rates),
    }


def send(address: str, seconds: float) -> dict[str, float]:
    sent, chunk = 0, bytes(_CHUNK)
    with _connect(address, STREAM_PORT) as connection:
        # close at once: megabytes still in the buffer would take a slow link many seconds
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            connection.sendall(chunk)
            sent += len(chunk)
    return {"sent_bytes": sent}


def echo() -> dict[str, float]:
    with _accept(ECHO_PORT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(4096):
            connection.sendall(data)
    return {}


def ping(address: str, count: int) -> dict[str, float]:
    """Half the median time of a round trip of 64 bytes."""
    times = []
    with _connect(address, ECHO_PORT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            begin = time.monotonic()
            connection.sendall(bytes(64))
            got = 0
            while got < 64:
                got += len(connection.recv(64))
            times.append(time.monotonic() - begin)
    return {"latency_s": statistics.median(times) / 2}


def main(argv: list[str]) -> int:
    match argv:
        case ["receive"]:
            result = receive()
        case ["send", address, seconds]:
            result = send(address, float(seconds))
        case ["echo"]:
            result = echo()
        case ["ping", address, count]:
            result = ping(address, int(count))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
