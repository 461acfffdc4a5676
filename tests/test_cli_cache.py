"""q27app cache: what lies in the folder of the prefix cache, and emptying it."""

from __future__ import annotations

import json

import numpy as np
from click.testing import CliRunner

from q27app.cli_cache import cache
from q27app.engine.disk_entry import write_entry
from q27app.errors import UsageError


def run(*arguments):
    return CliRunner().invoke(cache, arguments)


def write(folder):
    write_entry(folder, b"f" * 32, "system", np.arange(64, dtype=np.int32), np.zeros(10, np.uint8), np.zeros((1, 20), np.uint8))


def test_entries_are_listed_and_cleared(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setenv("Q27APP_CACHE__DIRECTORY", str(tmp_path))
    (entry,) = json.loads(run("list", "--json").output)["entries"]
    assert (entry["kind"], entry["tokens"], entry["fingerprint"]) == ("system", 64, "66666666")
    assert "system" in run("list").output and "64 tokens" in run("list").output
    assert run("clear").output.startswith("1 files deleted")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_must_be_named():
    assert isinstance(run("list").exception, UsageError)


def test_a_flag_names_another_folder(tmp_path):
    write(tmp_path)
    assert "system" in run("list", "--prefix-cache", str(tmp_path)).output
