"""Copying through the terminal: OSC 52, which also crosses ssh, and its wrapped form for tmux."""

from __future__ import annotations

import base64

MAX_BYTES = 100_000
"""Terminals drop longer sequences, some without a word."""


def copy_sequence(text: str, in_tmux: bool) -> str:
    """What the terminal must receive. In tmux both forms: bare for `set-clipboard on`, wrapped for `allow-passthrough on`."""
    code = f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07"
    if not in_tmux:
        return code
    return code + "\x1bPtmux;" + code.replace("\x1b", "\x1b\x1b") + "\x1b\\"
