"""Streaming clients in a process of their own: python load_clients.py PORT SECONDS CLIENTS. Prints what they saw as JSON.

lags: how late a task of this process ran that had nothing to wait for but the time, which is what the machine and the clients
themselves add to every first byte.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

SHARE_THAT_LEAVES = 0.2


async def stream_once(port: int, rng: random.Random, first_bytes: list[float], faults: list[str]) -> None:
    """One request over its own connection, read to the end or left in the middle."""
    body = {"max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": f"hi {rng.random()}"}]}
    raw = json.dumps(body).encode()
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        head = await reader.readuntil(b"\n\n")
        first_bytes.append(time.monotonic() - started)
        if b"200 OK" not in head:
            faults.append(head[:200].decode())
        elif rng.random() < SHARE_THAT_LEAVES:
            await asyncio.sleep(rng.random())
        elif b"message_stop" not in await reader.read():
            faults.append("a stream ended without message_stop")
    finally:
        writer.close()


async def main(port: int, duration_s: float, num_clients: int) -> None:
    first_bytes: list[float] = []
    lags: list[float] = []
    faults: list[str] = []
    deadline = time.monotonic() + duration_s

    async def client(number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.random() * 2)
        while time.monotonic() < deadline:
            await stream_once(port, rng, first_bytes, faults)

    async def watch() -> None:
        while time.monotonic() < deadline:
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - due)

    await asyncio.gather(watch(), *(client(number) for number in range(num_clients)))
    json.dump({"first_bytes": first_bytes, "lags": lags, "faults": faults}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
