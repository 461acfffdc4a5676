"""A journal keeps whole rows whatever happens, and takes only what belongs into it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.bench.journal import Journal, read_journal
from q27app.errors import FileFormatError, UsageError


def filled(path, count=3):
    with Journal(path, "speed", {"runs": 3}, {"card": "none"}) as journal:
        for number in range(count):
            journal.add(f"row {number}", value=number)
    return path


def test_rows_are_there_again(tmp_path):
    with Journal(filled(tmp_path / "j"), "speed", {"runs": 3}, {"card": "other"}) as journal:
        assert journal.num_kept == 3 and journal.rows["row 1"]["value"] == 1
        assert journal.missing(["row 2", "row 3"]) == ["row 3"]
        assert journal.stamp == {"card": "none"}


@given(st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, share):
    path = filled(tmp_path_factory.mktemp("cut") / "j")
    whole = path.read_bytes()
    size = len(whole) * share // 1000
    path.write_bytes(whole[:size])
    with Journal(path, "speed", {"runs": 3}, {}) as journal:
        assert list(journal.rows) == [f"row {number}" for number in range(max(0, whole[:size].count(b"\n") - 1))]
        journal.add("after", value=9)
    header, rows = read_journal(path)
    assert header["settings"] == {"runs": 3} and rows[-1]["key"] == "after"


def test_other_settings_are_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="runs 3, now it is 5"):
        Journal(filled(tmp_path / "j"), "speed", {"runs": 5}, {})
    with pytest.raises(UsageError, match="bench speed, not of turns"):
        Journal(tmp_path / "j", "turns", {"runs": 3}, {})


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b'{"a": 1}\n', b"\xff\xfe", b'{"bench": "speed", "settings": {"runs": 3}}\n{"no": 1}\n'])
def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        Journal(path, "speed", {"runs": 3}, {})
    assert path.read_bytes() == content


def test_two_writers_are_refused(tmp_path):
    with Journal(tmp_path / "j", "speed", {}, {}):
        with pytest.raises(UsageError, match="another benchmark"):
            Journal(tmp_path / "j", "speed", {}, {})


def test_a_killed_writer_leaves_every_row_that_it_reported(tmp_path):
    path = tmp_path / "j"
    program = ("import sys, time\nfrom pathlib import Path\nfrom q27app.bench.journal import Journal\n"
               "j = Journal(Path(sys.argv[1]), 'speed', {}, {})\n"
               "for n in range(5):\n    j.add(f'row {n}', value='x' * 50)\n    print(n, flush=True)\ntime.sleep(600)\n")
    writer = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    for _ in range(5):
        assert writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    with Journal(path, "speed", {}, {}) as journal:
        assert len(journal.rows) == 5
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_every_row_is_synced(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr("q27app.bench.journal.os.fsync", lambda file: (synced.append(file), real(file)))
    filled(tmp_path / "j", 3)
    assert len(synced) == 4
