"""Draw every screen into an SVG beside this file: python docs/screens/make.py [NAME ...].

The screens run without a terminal, on the scripted daemon of the tests; figures move as they would in use.
"""

from __future__ import annotations

import asyncio
import html
import importlib.util
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TESTS = FOLDER.parents[1] / "tests" / "tui"
sys.path.insert(0, str(FOLDER.parents[1]))

ANSWER = """Two kernels bound the decode step.

## Where the time goes

- `linear_rows` reads every weight once: **17.2 GB** at 1.79 TB/s are 9.6 ms.
- `attend_decode` reads the KV cache, which grows with the context.

```python
def tokens_per_s(num_bytes: float, bandwidth: float, accepted: float) -> float:
    return accepted / (num_bytes / bandwidth)
```

| context | ms a step | tok/s |
|---|---|---|
| 2,048 | 10.1 | 268 |
| 32,768 | 12.4 | 218 |

Drafts raise the last column, never the text.
"""
THOUGHT = "The step is bound by memory. Weights are read once a step, so drafts that are right share that read.\n" * 3


_TEXT = re.compile(r'<text class="([^"]+)" x="([0-9.]+)" y="([0-9.]+)" textLength="([0-9.]+)" clip-path="([^"]+)">([^<]*)</text>')


def settled(svg: str) -> str:
    """The picture with each word at a place of its own, so that no viewer's font moves the columns; it loads nothing."""
    def words(match: re.Match[str]) -> str:
        kind, x, y, length, clip, text = match.groups()
        text = html.unescape(text)
        cell = float(length) / max(1, len(text))
        found = []
        for word in re.finditer("[\u2800-\u28ff]|[^\u00a0\u2800-\u28ff]+(?:\u00a0[^\u00a0\u2800-\u28ff]+)*", text):
            place, size = float(x) + word.start() * cell, len(word[0]) * cell
            if word[0] != "\u2800":
                found.append(f'<text class="{kind}" x="{place:.1f}" y="{y}" textLength="{size:.1f}" clip-path="{clip}">'
                             f"{html.escape(word[0])}</text>")
        return "".join(found)

    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return _TEXT.sub(words, svg).replace("Fira Code", "DejaVu Sans Mono, monospace")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"screens_{name}", TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scenes, scripted_daemon = load("scenes"), load("scripted_daemon")


def show_made_machine() -> None:
    """The doctor and the set-up look at the machine of the tests."""
    from q27app.setup import doctor, facts

    findings, known = load("test_doctor_screen").FINDINGS, load("test_setup_screen").FACTS
    doctor.run_doctor, facts.read_facts = lambda: list(findings), lambda: known


async def draw(name: str, scene: str, size: tuple[int, int], **options: Any) -> None:
    """One picture; name says what is done first."""
    from q27app.tui.app import Q27App

    with tempfile.TemporaryDirectory() as folder:
        async with scripted_daemon.ScriptedDaemon(scenes.SCENES[scene], [*scenes.LOG, *scenes.RECENT]) as daemon:
            daemon.script = lambda body: [{"reasoning_content": THOUGHT}, 0.1, ANSWER]
            daemon.usage = {"prompt_tokens": 1_204, "completion_tokens": 412, "prompt_tokens_details": {"cached_tokens": 1_152},
                            "completion_tokens_details": {"reasoning_tokens": 66}}
            app = Q27App(daemon.url, history_path=Path(folder) / "history.db", interval_s=3600, **options)
            async with app.run_test(size=size) as pilot:
                while not (app.poller and app.snapshot and app.recent):
                    await pilot.pause(0.02)
                await move_figures(app, daemon)
                if scene == "disconnected":
                    daemon.status = None
                    await app.poller.ask()
                await visit(name, app, pilot)
                app.address = "http://127.0.0.1:8027"
                app.renew()
                await pilot.pause(0.3)
                svg = settled(app.export_screenshot(title="q27app")).replace(str(daemon.port), "8027")
                (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


async def move_figures(app: Any, daemon: Any) -> None:
    """Two minutes of history."""
    from q27app.tui.snapshot import Snapshot

    latest = daemon.status
    for second in range(120):
        wave = max(0.0, math.sin(second / 9) + 0.3 * math.sin(second / 2.3)) if latest["requests"] else 0.03
        card = {**latest["gpus"][0]}
        for key, top in (("utilization_percent", 97), ("power_w", 448)):
            card[key] = None if card[key] is None else top * min(1.0, 0.05 + wave)
        rates = {"decode_tokens_per_s": 190 * wave * (second % 30 > 5), "prefill_tokens_per_s": 2_400 * wave * (second % 30 <= 5)}
        rates = rates if latest["requests"] else latest["engine"]["rates"]
        app.poller.trends.add(Snapshot({**latest, "gpus": [card], "engine": {**latest["engine"], "rates": rates}}))
    await app.poller.ask()


async def visit(name: str, app: Any, pilot: Any) -> None:
    """Go to the screen that the picture is of."""
    key = {"chat": "c", "chat-list": "c", "models": "m", "log": "g", "help": "question_mark", "detail": "enter", "doctor": "d",
           "setup": "s", "setup-80x24": "s"}.get(name)
    if key:
        await pilot.press(key)
        await pilot.pause(0.2)
    if name.startswith("setup"):
        while app.screen.question is None or app.screen.question.step != "context":
            if app.screen.question is not None:
                await pilot.press("enter")
            await pilot.pause(0.05)
        await pilot.press("down")
    if name.startswith("chat"):
        app.screen.ask("What bounds the speed of decoding?")
        while app.screen.answer is not None:
            await pilot.pause(0.05)
        if name == "chat-list":
            await pilot.press("f2")


PICTURES: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "monitor": ("queue", (120, 40), {}),
    "monitor-80x24": ("busy", (80, 24), {}),
    "monitor-60x20": ("busy", (60, 20), {}),
    "monitor-ascii": ("busy", (80, 24), {"is_ascii": True}),
    "loading": ("loading", (80, 24), {}),
    "failed": ("failed", (80, 24), {}),
    "disconnected": ("disconnected", (80, 24), {}),
    "detail": ("busy", (80, 24), {}),
    "chat": ("idle", (100, 40), {}),
    "chat-list": ("idle", (100, 40), {}),
    "models": ("idle", (80, 24), {}),
    "log": ("idle", (80, 24), {}),
    "help": ("idle", (80, 24), {}),
    "doctor": ("idle", (80, 24), {}),
    "setup": ("idle", (120, 40), {}),
    "setup-80x24": ("idle", (80, 24), {}),
}


async def main(names: list[str]) -> None:
    show_made_machine()
    for name in names or PICTURES:
        scene, size, options = PICTURES[name]
        await draw(name, scene, size, **options)
        print(f"{name}.svg")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
