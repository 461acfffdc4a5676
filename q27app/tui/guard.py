"""Gives the terminal back when the screens are killed without a chance to do it themselves.

The screens run in a child; this process only waits for it, so that a shell that waits for this process gets its terminal in order:
main screen, no mouse or paste reports, the line discipline as it was. If this process is killed, the child gets SIGTERM and leaves
by itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

RESET = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?2004l\x1b[?1004l\x1b[<u\x1b[0m"
"""Main screen, cursor, no mouse, no paste marks, no focus reports, the keyboard's own protocol, no colours."""
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def run_guarded(terminal: int, run: Callable[[], int]) -> int:
    """Run `run` in a child; its exit code, or 128 + the signal that killed it. terminal: the file descriptor to restore.

    Call it before there are threads: it forks.
    """
    import termios

    try:
        settings = termios.tcgetattr(terminal)
    except termios.error:
        return run()
    child = os.fork()
    if child == 0:
        _be_child(run)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    status = _wait(child)
    if os.WIFSIGNALED(status):
        os.write(terminal, RESET.encode())
        termios.tcsetattr(terminal, termios.TCSANOW, settings)
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def _be_child(run: Callable[[], int]) -> None:
    """Never returns."""
    import ctypes
    import sys

    code = 70
    try:
        getattr(ctypes.CDLL(None), "prctl", lambda *numbers: None)(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        code = run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    """The child's end. Stops when it stops (ctrl+z), and wakes it when a shell brings this process back."""
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(child, signal.SIGCONT)
