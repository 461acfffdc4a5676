"""What the screens cost: time to the first frame, and processor time while nothing happens."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from q27app.config import child_environment
from tests.pace import slowness

REPOSITORY = Path(__file__).resolve().parents[2]
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Visit:
    """The program on a pseudo terminal of 120 x 40. output: all that it has written."""

    def __init__(self, url: str) -> None:
        self.output = b""
        self.started = time.monotonic()
        self.process, self._terminal = pty.fork()
        if self.process == 0:
            os.chdir(REPOSITORY)
            os.execve(sys.executable, [sys.executable, "-m", "q27app", "--connect", url],
                      child_environment({"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}))
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        asyncio.get_running_loop().add_reader(self._terminal, self._read)

    def _read(self) -> None:
        try:
            self.output += os.read(self._terminal, 1 << 16)
        except OSError:
            asyncio.get_running_loop().remove_reader(self._terminal)

    async def shows(self, wanted: bytes) -> float:
        """Seconds from the start until it is there."""
        while wanted not in self.output:
            assert time.monotonic() - self.started < 300, self.output[-2000:]
            await asyncio.sleep(0.005)
        return time.monotonic() - self.started

    def processor_s(self) -> float:
        """Of the guard and the screens."""
        children = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        figures = [Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split() for name in (str(self.process), *children)]
        return sum(int(line[11]) + int(line[12]) for line in figures) * TICK_S

    async def leave(self) -> None:
        os.write(self._terminal, b"q")
        await asyncio.to_thread(os.waitpid, self.process, 0)
        asyncio.get_running_loop().remove_reader(self._terminal)
        os.close(self._terminal)


@pytest.mark.long
async def test_the_first_frame_is_quick_and_idling_is_cheap(daemon_of, long_scale, capsys):
    seconds = max(5.0, 30 * long_scale)
    firsts, costs = [], []
    async with daemon_of("idle") as daemon:
        for _ in range(5):
            visit = Visit(daemon.url)
            firsts.append(await visit.shows(b"1 card"))
            costs.append(visit.processor_s())
            await visit.shows(b"RTX 5090")
            if len(firsts) < 5:
                await visit.leave()
        await asyncio.sleep(3)
        before = visit.processor_s()
        await asyncio.sleep(seconds)
        share = (visit.processor_s() - before) / seconds
        await visit.leave()
    with capsys.disabled():
        print(f"\nfirst frame after {min(firsts):.2f} to {max(firsts):.2f} s, {min(costs):.2f} s of processor time; "
              f"idle for {seconds:.0f} s: {share:.1%} of a core")
    slow = slowness()
    assert min(costs) < 0.7 * slow  # and so is the time on a machine that has nothing else to do
    assert share < 0.03 * slow
