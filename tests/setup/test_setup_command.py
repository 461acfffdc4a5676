"""q27app setup in a pseudo-terminal and by flags, on cards that are not there."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import time
import tomllib
from pathlib import Path

import pytest

from q27app import cli, gpu
from q27app.config import child_environment, config_path, load_config
from q27app.errors import UsageError
from q27app.setup.settings_file import with_settings, write_settings

REPOSITORY = Path(__file__).resolve().parents[2]
FAKE = """
import sys
from q27app import gpu
from q27app.gpu import DriverInfo, GpuInfo
cards = tuple(GpuInfo(i, f"GPU-{i}{i}{i}{i}{i}{i}{i}{i}", name, (8, 9), size << 30, 0, free << 30) for i, (name, size, free) in
              enumerate([("NVIDIA GeForce RTX 4090", 24, 23), ("NVIDIA GeForce RTX 4060 Ti", 16, 15)]))
gpu.read_gpus, gpu.read_driver, gpu.nvidia_device_exists = lambda: cards, lambda: DriverInfo("580.65", (13, 0)), lambda: True
"""
PROGRAM = FAKE + "from q27app.cli import main\nmain(sys.argv[1:])"
COMMENTED = "# mine\n[server]\nport = 8100   # because\n\n[sampling]\ntop_k = 7\n"


@pytest.fixture
def no_systemd(tmp_path, monkeypatch):
    """A login whose systemctl knows no user manager."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "systemctl").write_text('#!/bin/sh\necho "Failed to connect to bus: No medium found" >&2\nexit 1\n')
    (folder / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def _take_terminal() -> None:
    """As a shell does before a program begins: standard input controls it, and Ctrl-C interrupts it, whatever this process ignores."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdin=slave, stdout=slave, stderr=slave, cwd=REPOSITORY,
                                        env=child_environment({"TERM": "xterm"}), start_new_session=True,
                                        preexec_fn=_take_terminal)
        os.close(slave)
        self.text = ""

    def until(self, pattern: str, seconds: float = 120) -> str:
        """What came up to the pattern."""
        limit = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            ready = select.select([self.master], [], [], max(0.0, limit - time.monotonic()))[0]
            try:
                piece = os.read(self.master, 65536) if ready else b""
            except OSError:
                piece = b""
            assert piece, f"no {pattern!r} in:\n{self.text}"
            self.text += piece.decode(errors="replace")
        seen, self.text = self.text[:found.end()], self.text[found.end():]
        return seen

    def say(self, text: str) -> None:
        os.write(self.master, text.encode() + b"\n")

    def end(self) -> int:
        try:
            return self.process.wait(120)
        finally:
            os.close(self.master)


@pytest.fixture
def configured():
    path = config_path()
    path.parent.mkdir(parents=True)
    path.write_text(COMMENTED)
    return path


def test_a_dialogue_on_a_terminal_goes_back_and_writes_once(no_systemd, configured):
    terminal = Terminal("setup", "--no-trial")
    terminal.until(r"checks \[leave\]: ")
    assert configured.read_text() == COMMENTED
    terminal.say("go")
    assert "RTX 4090" in terminal.until(r"card \[GPU-00000000\]: ")
    terminal.say("2")
    terminal.until(r"model \[Qwen3.5-9B\]: ")
    terminal.say("b")
    terminal.until(r"card \[GPU-11111111\]: ")
    terminal.say("1")
    terminal.until(r"model \[Qwen3.6-27B\]: ")
    terminal.say("")
    assert "perplexity" in terminal.until(r"tier \[q4s\]: ")
    terminal.say("\x07hello")
    assert "control characters" in terminal.until(r"tier \[q4s\]: ")
    terminal.say("q4s")
    terminal.until(r"kv \[\w+\]: ")
    terminal.say("fp8")
    assert "KV cache" in terminal.until(r"context \[\d+\]: ")
    terminal.say("40960")
    terminal.until(r"slots \[\d\]: ")
    terminal.say("2")
    terminal.until(r"fetch \[later\]: ")
    terminal.say("")
    for step in ("idle", "access"):
        terminal.until(rf"{step} \[\w+\]: ")
        terminal.say("key" if step == "access" else "600")
    terminal.until(r"clients \[\w+\]: ")
    terminal.say("show")
    assert "model.context = 40960" in terminal.until(r"review \[write\]: ")
    assert configured.read_text() == COMMENTED
    terminal.say("write")
    terminal.until("Next: q27app serve")
    assert terminal.end() == 0
    text = configured.read_text()
    assert text.startswith("# mine\n[server]\nport = 8100   # because\n") and "top_k = 7" in text
    loaded = load_config()
    assert (loaded.model.gpu, loaded.model.kv, loaded.model.context, loaded.model.slots) == ("GPU-00000000", "fp8", 40960, 2)
    assert loaded.model.idle_unload == 600 and loaded.server.port == 8100
    assert stat.S_IMODE(Path(loaded.server.api_key_file).stat().st_mode) == 0o600


def test_ctrl_c_writes_nothing(no_systemd, configured):
    terminal = Terminal("setup")
    terminal.until(r"checks \[leave\]: ")
    terminal.say("go")
    terminal.until(r"card \[GPU-00000000\]: ")
    os.write(terminal.master, b"\x03")
    terminal.until("interrupted")
    assert terminal.end() == 130
    assert configured.read_text() == COMMENTED and sorted(p.name for p in configured.parent.iterdir()) == ["config.toml"]


@pytest.fixture
def cards(no_systemd, monkeypatch):
    """The cards of FAKE in this process; run(flags, typed) -> exit code."""
    for name in ("read_gpus", "read_driver", "nvidia_device_exists"):
        monkeypatch.setattr(gpu, name, getattr(gpu, name))
    exec(FAKE, {})

    def run(*flags: str, typed: str | None = None) -> int:
        if typed is not None:
            keyboard = io.StringIO(typed)
            keyboard.isatty = lambda: True
            monkeypatch.setattr(sys, "stdin", keyboard)
        return cli.run(["setup", *flags])

    return run


def test_the_end_of_input_writes_nothing(cards, configured):
    assert cards("--no-trial", typed="go\n\n\n") == 130 and configured.read_text() == COMMENTED


def test_leaving_writes_nothing(cards, configured, capsys):
    assert cards("--no-trial", typed="?\nq\n") == 0 and configured.read_text() == COMMENTED
    assert "Nothing was written" in capsys.readouterr().err


def test_endless_nonsense_ends(cards, configured, capsys):
    assert cards(typed="x" * 1_000_000 + "\n" + "no\n" * 100) == 2 and configured.read_text() == COMMENTED
    assert len(capsys.readouterr().err) < 10_000


def test_flags_answer_everything_without_a_terminal(cards):
    assert cards("--yes", "--gpu", "GPU-1111", "--model", "Qwen3.5-9B", "--tier", "q6", "--kv", "fp8", "--ctx", "65536", "--slots", "2",
                 "--later", "--idle", "0", "--access", "open", "--no-clients") == 0
    written = tomllib.loads(config_path().read_text())
    assert written["model"] == {"gpu": "GPU-11111111", "kv": "fp8", "context": 65536, "slots": 2, "embed": "device"}
    assert stat.S_IMODE(config_path().stat().st_mode) == 0o600
    assert cards("--yes", "--gpu", "GPU-1111", "--model", "Qwen3.5-9B", "--tier", "q6", "--later", "--ctx", "32768") == 0
    written = tomllib.loads(config_path().read_text())["model"]
    assert (written["context"], written["slots"]) == (32768, 2)


@pytest.mark.parametrize("flags, needle", [
    ((), "--yes"), (("--yes", "--later", "--download", "a/b:c"), "together"), (("--yes", "--ctx", "10000000", "--model", "Qwen3.6-27B"), "cannot be chosen"),
    (("--yes", "--gpu", "Voodoo"), "card: "), (("--yes", "--access", "everybody"), "access: "), (("--yes", "--import", "/no/such", "--model", "Qwen3.6-27B"), "/no/such")])
def test_flags_that_cannot_be_write_nothing(cards, capsys, flags, needle):
    flags = flags if "--import" in flags or not flags or "--later" in flags else (*flags, "--later")
    assert cards(*flags) in (1, 2) and needle in capsys.readouterr().err
    assert not config_path().exists()


def test_a_dry_run_shows_and_writes_nothing(cards, capsys):
    assert cards("--yes", "--dry-run", "--no-trial", "--gpu", "cpu", "--idle", "60") == 0
    assert "model.idle_unload = 60" in capsys.readouterr().out and not config_path().exists()


@pytest.mark.long
def test_the_load_test_measures_the_bundled_model(no_systemd, capsys):
    assert cli.run(["setup", "--yes", "--trial", "--gpu", "cpu", "--model", "demo"]) == 0
    assert re.search(r"\d+\.\d tokens/s, loaded in \d+ s", capsys.readouterr().out)


def test_settings_are_put_into_text_that_stays():
    text = '# top\n[model] # sec\npath = "a" # old\n\n[server]\nport = 1\n'
    assert with_settings(text, {"model.path": "b", "log.level": "debug"}) == (
        '# top\n[model] # sec\npath = "b" # old\n\n[server]\nport = 1\n\n[log]\nlevel = "debug"\n')
    for bad in ("[model", "model = 3"):
        with pytest.raises(UsageError):
            with_settings(bad, {"model.path": "b"})


def test_a_setting_that_is_refused_leaves_the_file(configured):
    with pytest.raises(UsageError, match="slots"):
        write_settings(configured, {"model.slots": 1000})
    assert configured.read_text() == COMMENTED and len(list(configured.parent.iterdir())) == 1


def test_a_linked_configuration_stays_a_link(tmp_path):
    real = tmp_path / "dotfiles.toml"
    real.write_text(COMMENTED)
    link = tmp_path / "config.toml"
    link.symlink_to(real)
    assert write_settings(link, {"model.slots": 2}) and link.is_symlink() and "slots = 2" in real.read_text()
    assert not write_settings(link, {"model.slots": 2})


def test_signals_in_the_middle_of_a_write_leave_a_whole_file(configured, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt(signal.SIGINT)

    monkeypatch.setattr("q27app.setup.settings_file.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_settings(configured, {"model.slots": 2})
    assert configured.read_text() == COMMENTED and len(list(configured.parent.iterdir())) == 1
