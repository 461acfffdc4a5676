"""A model that is faster than reading: the screen keeps up, each block is drawn once, the text is the same byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest

from q27app.gpu import read_host
from tests.pace import slowness

WORDS = ("the", "model", "reads", "*every*", "token", "of", "`your`", "text,", "and", "**this**", "answer", "is", "é", "1.5")


def tokens(count: int, seed: int = 7) -> list[str]:
    """A Markdown answer of that many tokens: paragraphs, lists, code, tables, and one very long paragraph."""
    source = random.Random(seed)
    found: list[str] = []

    def sentence(length: int) -> list[str]:
        return [source.choice(WORDS) + " " for _ in range(length)]

    while len(found) < count:
        kind = source.choice(("paragraph", "list", "code", "table", "head", "long"))
        if kind == "code":
            found += ["```python\n", *(part for _ in range(30) for part in ("value ", "= ", "call(", "1", ")\n")), "```\n", "\n"]
        elif kind == "list":
            found += [part for _ in range(8) for part in ("- ", *sentence(9), "\n")] + ["\n"]
        elif kind == "table":
            found += ["| a ", "| b |\n", "|---", "|---|\n", *(part for _ in range(12) for part in ("| 1 ", "| two |\n")), "\n"]
        elif kind == "head":
            found += ["## ", *sentence(4), "\n\n"]
        else:
            found += [*sentence(900 if kind == "long" else 60), "\n\n"]
    return found[:count]


def stream(screens, daemon, parts: list[str], per_second: float) -> None:
    """Have the daemon say the parts at this pace, whatever the sleep's grain."""
    def script(body):
        started = time.monotonic()
        for index, part in enumerate(parts):
            ahead = index / per_second - (time.monotonic() - started)
            if ahead > 0.002:
                yield ahead
            yield part

    daemon.script = script
    screens.app.screen.ask("go on")  # a pressed key would wait until the screen is quiet


async def test_finished_blocks_are_drawn_once_and_updates_are_few(daemon_of, open_screens, tmp_path):
    parts = tokens(1_200)
    async with daemon_of("idle") as daemon, open_screens(daemon, (120, 40), first="chat") as screens:
        await screens.shows("Ask something")
        chat = screens.app.screen
        before, started = chat.transcript.num_drawn, time.monotonic()
        stream(screens, daemon, parts, 800)
        await screens.until(lambda: chat.answer is None, 300)
        seconds = time.monotonic() - started
        await screens.pilot.pause(0.2)
        num_blocks = len(chat.entries[-1].sections())
        assert chat.entries[-1].source == "".join(parts)
        assert chat.history.branch(chat.conversation.id)[-1].text == "".join(parts)
        assert chat.transcript.num_drawn - before <= num_blocks + 10 * seconds + 20


@pytest.mark.long
async def test_20000_tokens_at_400_a_second_never_hold_the_loop(daemon_of, open_screens, long_scale, record_property, capsys):
    parts = tokens(max(2_000, int(20_000 * long_scale)))
    lags: list[float] = []
    held: list[float] = []
    resident: list[int] = []

    async def watch() -> None:
        for count in itertools.count():
            before, busy_before = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - before - 0.01)
            held.append(time.thread_time() - busy_before)
            if count % 50 == 0:
                resident.append(read_host().process_bytes or 0)

    async with daemon_of("idle") as daemon, open_screens(daemon, (120, 40), first="chat", interval_s=1.0) as screens:
        await screens.shows("Ask something")
        watcher = asyncio.create_task(watch())
        started, busy = time.monotonic(), time.process_time()
        stream(screens, daemon, parts, 400)
        chat = screens.app.screen
        await screens.until(lambda: chat.answer is None, 2000)
        seconds, busy = time.monotonic() - started, time.process_time() - busy
        watcher.cancel()
        assert chat.entries[-1].source == "".join(parts)
        assert chat.history.branch(chat.conversation.id)[-1].text == "".join(parts)
        lags.sort()
        held.sort()
        p99, p99_held = (figures[int(0.99 * len(figures))] for figures in (lags, held))
        grown = resident[-1] - resident[len(resident) // 4]
        with capsys.disabled():
            print(f"\n{len(parts)} tokens in {seconds:.1f} s ({len(parts) / seconds:.0f}/s), loop lag p50 {lags[len(lags) // 2] * 1e3:.1f} ms, "
                  f"p99 {p99 * 1e3:.1f} ms, most {lags[-1] * 1e3:.0f} ms, of that own work p99 {p99_held * 1e3:.1f} ms, CPU {busy / seconds:.0%}, memory +{grown / 1e6:.1f} MB "
                  f"after the first quarter, {chat.transcript.virtual_size.height} lines")
        assert p99_held < 0.1 * slowness()  # a busy machine adds to the lag, not to the work
        assert grown < 40e6
