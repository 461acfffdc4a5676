"""The unit file, and systemctl and loginctl played by scripts."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from click.testing import CliRunner

from q27app import errors
from q27app.cli_service import service
from q27app.config import child_environment
from q27app.errors import UsageError
from q27app.setup import service as unit

HIDES_THE_GPU = ("PrivateDevices", "DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute", "ProtectHome", "SystemCallFilter",
                 "network-online.target", "User=", "PrivateTmp")


def settings_of(text):
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith(("#", "Environment")))


def test_the_unit_restarts_only_what_may_help():
    found = settings_of(unit.unit_text())
    assert set(map(int, found["RestartPreventExitStatus"].split())) == {2, 3, 4, 5, 6}
    assert str(errors.EXIT_ENGINE_DIED) not in found["RestartPreventExitStatus"].split()
    assert found["Type"] == "notify" and found["WatchdogSec"] == "120" and found["StartLimitBurst"] == "5"


def test_nothing_in_the_unit_hides_the_gpu():
    text = unit.unit_text()
    assert [word for word in HIDES_THE_GPU if word in text] == [] and "@" not in text


def test_paths_with_blanks_and_signs_are_quoted():
    command = settings_of(unit.unit_text("/a b/100%/py", "/opt/c/bin/nvcc"))["ExecStart"]
    assert command == '"/a b/100%%/py" -P -m q27app serve'
    assert "Environment=PATH=/opt/c/bin:" in unit.unit_text("/py", "/opt/c/bin/nvcc")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_finds_no_fault_with_the_unit(tmp_path):
    path = tmp_path / "q27app.service"
    path.write_text(unit.unit_text())
    def faults():
        done = subprocess.run(["systemd-analyze", "--user", "verify", str(path)], capture_output=True, text=True,
                              env=child_environment({"XDG_RUNTIME_DIR": str(tmp_path)}))
        return [line for line in done.stderr.splitlines() if "q27app.service" in line or "Failed to" in line]

    assert faults() == []
    path.write_text(unit.unit_text().replace("WatchdogSec=120", "WatchdogSec=soon"))
    assert "soon" in str(faults()), "this machine's systemd-analyze finds no fault in anything"


def test_a_reload_is_a_signal_that_the_daemon_knows():
    assert settings_of(unit.unit_text())["ExecReload"] == "/bin/kill -HUP $MAINPID"


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """Scripts on PATH that note their arguments; linger and bus as told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "calls"

    def play(linger="no", bus=True):
        trouble = "" if bus else 'echo "Failed to connect to bus: No medium found" >&2; exit 1'
        for name, answer in (("systemctl", "echo ActiveState=active"), ("loginctl", f"echo {linger}")):
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{trouble}\n{answer}\n')
            (folder / name).chmod(0o755)

    log.write_text("")
    play()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return play, lambda: log.read_text().splitlines()


def test_install_and_uninstall(systemd):
    done = CliRunner().invoke(service, ["install", "--linger"])
    assert done.exit_code == 0 and "Linger enabled" in done.stdout and unit.unit_path().is_file()
    assert "systemctl --user enable --now q27app.service" in systemd[1]() and "loginctl enable-linger" in systemd[1]()
    assert unit.describe()["ActiveState"] == "active"
    done = CliRunner().invoke(service, ["uninstall"])
    assert not unit.unit_path().exists() and "loginctl disable-linger" in systemd[1]() and "removed" in done.stdout


def test_linger_of_others_is_left_alone(systemd):
    systemd[0](linger="yes")
    assert "Linger" not in CliRunner().invoke(service, ["install"]).stdout
    unit.uninstall()
    assert "loginctl disable-linger" not in systemd[1]()


def test_a_login_without_a_user_manager_is_told(systemd):
    systemd[0](bus=False)
    with pytest.raises(unit.NoUserManager, match="no systemd user manager") as caught:
        unit.install()
    assert "q27app serve" in caught.value.hint and not unit.unit_path().exists()


def test_a_service_that_is_not_there_cannot_be_started(systemd):
    with pytest.raises(UsageError, match="not installed"):
        unit.control("start")
