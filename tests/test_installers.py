"""The installers: what they refuse, what they keep, and that the package carries its data."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
INSTALLERS = REPOSITORY / "installers"
SCRIPTS = [*sorted(INSTALLERS.glob("*.sh")), REPOSITORY / ".ci" / "run"]


def run_script(script: Path, *arguments: str, home: Path, path: str = "/usr/local/bin:/usr/bin:/bin",
               text: str = "", timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """A script in a clean environment with its own HOME."""
    return subprocess.run(["/bin/bash", str(script), *arguments], input=text, capture_output=True, text=True,
                          timeout=timeout, env={"HOME": str(home), "PATH": path}, cwd=home)


@pytest.fixture
def home(tmp_path) -> Path:
    folder = tmp_path / "user"
    folder.mkdir()
    return folder


@pytest.fixture
def installed(home) -> Path:
    """A HOME that looks as after an installation with a model and a configuration."""
    for name in (".local/share/q27app/program/bin/q27app", ".local/bin/q27app", ".local/share/q27app/models/mine.q27",
                 ".config/q27app/config.toml"):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return home


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0


@pytest.mark.parametrize("name", ["install.sh", "uninstall.sh", "test.sh"])
def test_scripts_may_be_run(name):
    assert os.access(INSTALLERS / name, os.X_OK)


@pytest.mark.parametrize("name", ["install.sh", "uninstall.sh"])
def test_an_unknown_option_changes_nothing(name, installed):
    before = sorted(installed.rglob("*"))
    done = run_script(INSTALLERS / name, "--frobnicate", home=installed)
    assert done.returncode == 1
    assert "unknown option --frobnicate" in done.stderr
    assert sorted(installed.rglob("*")) == before


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(home):
    (home / ".local").write_text("a file")
    done = run_script(INSTALLERS / "install.sh", home=home)
    assert done.returncode == 1
    assert f"error: {home}/.local/share/q27app cannot be made.\n  Set Q27APP_HOME" in done.stderr


def test_a_missing_python_is_named(home, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("dirname", "id", "sed"):
        (tools / tool).symlink_to(f"/usr/bin/{tool}")
    done = run_script(INSTALLERS / "install.sh", home=home, path=str(tools))
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("user, code, needle", [(0, 0, "Installing python3 python3-venv"), (1000, 1, "sudo apt-get install -y")])
def test_root_gets_a_missing_python_and_others_its_name(home, tmp_path, user, code, needle):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "id").write_text(f"#!/bin/sh\necho {user}\n")
    install = f'[ "$1" = install ] && /bin/ln -s {sys.executable} {tools}/python3; exit 0'
    (tools / "apt-get").write_text(f"#!/bin/sh\n{install}\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    script = tmp_path / "look.sh"
    script.write_text(f'. {INSTALLERS}/common.sh\nfind_python\necho "found $PYTHON"\n')
    done = run_script(script, home=home, path=str(tools))
    assert done.returncode == code, done.stdout + done.stderr
    assert needle in done.stdout + done.stderr
    assert (f"found {tools}/python3" in done.stdout) == (code == 0)


def test_uninstalling_asks_and_no_answer_means_no(installed):
    done = run_script(INSTALLERS / "uninstall.sh", home=installed)
    assert done.returncode == 0
    assert (installed / ".local/bin/q27app").exists()


def test_uninstalling_keeps_models_and_configuration(installed):
    done = run_script(INSTALLERS / "uninstall.sh", "--yes", home=installed)
    assert done.returncode == 0
    assert not (installed / ".local/bin/q27app").exists()
    assert not (installed / ".local/share/q27app/program").exists()
    assert (installed / ".local/share/q27app/models/mine.q27").exists()
    assert (installed / ".config/q27app/config.toml").exists()
    assert "Kept models" in done.stdout


def test_purging_asks_for_each_folder(installed):
    run_script(INSTALLERS / "uninstall.sh", "--purge", home=installed, text="y\nn\ny\n")
    assert (installed / ".local/share/q27app/models/mine.q27").exists()
    assert not (installed / ".config/q27app").exists()


def test_purging_leaves_what_a_link_points_to(installed, tmp_path):
    elsewhere = tmp_path / "disk"
    (installed / ".local/share/q27app").rename(elsewhere)
    (installed / ".local/share/q27app").symlink_to(elsewhere)
    run_script(INSTALLERS / "uninstall.sh", "--purge", "--yes", home=installed)
    assert not (installed / ".local/share/q27app").is_symlink()
    assert (elsewhere / "models/mine.q27").exists()


def test_the_oldest_click_that_may_be_installed_has_the_error_of_a_group_without_its_command():
    wanted = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    (oldest,) = [line.removeprefix("click>=") for line in wanted if line.startswith("click>=")]
    assert tuple(map(int, oldest.split("."))) >= (8, 2), "cli.run names click.exceptions.NoArgsIsHelpError"


def test_every_data_file_of_the_package_is_declared():
    package = REPOSITORY / "q27app"
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["q27app"]
    declared = {path for pattern in patterns for path in package.glob(pattern)}
    tracked = subprocess.run(["git", "ls-files", "q27app"], cwd=REPOSITORY, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    data = {REPOSITORY / line for line in tracked.stdout.splitlines() if not line.endswith(".py")}
    assert data - declared == set()
    assert package / "data" / "demo.q27" in declared


@pytest.mark.long
def test_a_clean_home_gets_an_answer_and_an_upgrade_keeps_everything(home):
    first = run_script(INSTALLERS / "install.sh", home=home, timeout=900)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "tokens/s" in first.stdout
    (home / ".config/q27app").mkdir(parents=True)
    (home / ".config/q27app/config.toml").write_text("[server]\nport = 8100\n")
    models = home / ".local/share/q27app/models"
    models.mkdir()
    (models / "mine.q27").write_bytes(b"kept")
    again = run_script(INSTALLERS / "install.sh", "--no-demo", home=home, timeout=900)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (models / "mine.q27").read_bytes() == b"kept"
    launcher = str(home / ".local/bin/q27app")
    shown = subprocess.run([launcher, "config", "show", "--origin"], env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
                           capture_output=True, text=True, cwd="/", check=True)
    assert "port = 8100" in shown.stdout
