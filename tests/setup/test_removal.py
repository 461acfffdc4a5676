"""q27app uninstall: lists first, keeps what is the user's, follows no link."""

from __future__ import annotations

import json

import pytest

from q27app import cli
from q27app.paths import cache_dir, config_dir, data_dir, models_dir, state_dir


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installation with a model, a configuration and a model on another disk."""
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    launcher = tmp_path / "user/.local/bin/q27app"
    program = data_dir() / "program/bin/q27app"
    for path in (program, models_dir() / "mine.q27", config_dir() / "config.toml", cache_dir() / "kernels/x.cubin", state_dir() / "daemon.log"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1000)
    launcher.parent.mkdir(parents=True)
    launcher.write_text('#!/bin/sh\nexec "/home/u/.local/share/q27app/program/bin/q27app" "$@"\n')
    (tmp_path / "disk.q27").write_bytes(b"far away")
    (models_dir() / "linked.q27").symlink_to(tmp_path / "disk.q27")
    return launcher


def test_the_program_goes_and_the_users_own_stays(installed, capsys):
    assert cli.run(["uninstall", "--yes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["goes", "launcher"], ["goes", "program"]]
    assert not installed.exists() and not (data_dir() / "program").exists()
    assert (models_dir() / "mine.q27").exists() and (config_dir() / "config.toml").exists() and cache_dir().exists()


def test_nothing_goes_without_a_yes(installed, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO("n\n"))
    assert cli.run(["uninstall"]) == 130 and installed.exists()
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO("yes\n"))
    assert cli.run(["uninstall", "--purge"]) == 130 and (models_dir() / "mine.q27").exists()
    assert cli.run(["uninstall", "--purge", "--dry-run"]) == 0 and (models_dir() / "mine.q27").exists()
    capsys.readouterr()
    assert cli.run(["uninstall", "--purge", "--json"]) == 0
    items = json.loads(capsys.readouterr().out)["items"]
    assert all(item["goes"] for item in items) and (models_dir() / "mine.q27").exists()


def test_a_purge_takes_all_but_what_links_point_to(installed, tmp_path):
    assert cli.run(["uninstall", "--purge", "--yes"]) == 0
    assert not [folder for folder in (data_dir(), config_dir(), cache_dir(), state_dir()) if folder.exists()]
    assert (tmp_path / "disk.q27").read_bytes() == b"far away"
    assert cli.run(["uninstall", "--yes"]) == 0


def test_a_launcher_of_somebody_else_stays(installed):
    installed.write_text("#!/bin/sh\necho mine\n")
    assert cli.run(["uninstall", "--yes"]) == 0 and installed.exists()
