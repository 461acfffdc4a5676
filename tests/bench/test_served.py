"""Daemons that a benchmark starts for itself: what they report, and that they end with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from q27app.child_daemon import ChildDaemon, ChildEnded
from q27app.cli import run

PROGRAM = """
from q27app.child_daemon import ChildDaemon
with ChildDaemon({"model.path": "demo", "model.backend": "numpy", "model.context": 1024}) as daemon:
    print(daemon.pid, flush=True)
    input()
"""


@pytest.mark.long
def test_two_formats_of_the_bundled_model_share_a_table(capfd):
    assert run(["bench", "turns", "--serve", "demo,ctx=4096,backend=numpy", "--serve", "demo,ctx=4096,kv=fp8,backend=numpy", "--turns", "2",
                "--scale", "0.1", "--tokens", "8", "--pause", "0.5", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert [(row["turn"], row["kv"], row["tier"]) for row in report["rows"]] == [(1, "fp32", "q8"), (2, "fp32", "q8"), (1, "fp8", "q8"), (2, "fp8", "q8")]
    assert all(row["num_tokens"] == 8 for row in report["rows"]) and report["rows"][1]["reuse_percent"] > 30


@pytest.mark.long
def test_a_daemon_ends_when_its_starter_is_killed():
    starter = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    limit = time.monotonic() + 120
    while time.monotonic() < limit and is_alive(pid):
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_daemon_that_cannot_start_says_why():
    with pytest.raises(ChildEnded, match="no such|does not exist|nothing") as caught:
        with ChildDaemon({"model.path": "nothing.q27"}):
            pass
    assert caught.value.exit_code in (2, 3)
