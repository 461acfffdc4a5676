"""The set-up as a form: every step at every size, the bar follows the cursor, work in a thread, written once at the end."""

from __future__ import annotations

import threading
import tomllib
from dataclasses import replace

import pytest

from q27app.config import config_path
from q27app.errors import Q27Error
from q27app.setup import facts as facts_module
from q27app.setup.cards import GIB
from q27app.setup.doctor import Finding
from q27app.setup.facts import Facts
from q27app.setup.plan import Machine
from q27app.setup.wizard import Option, Question, Trial, plan_for

CARD = Machine("NVIDIA GeForce RTX 4090", (8, 9), int(23.5 * GIB), 24 * GIB, "GPU-1f3a9c02-7d1e", has_display=True)
OLD = Machine("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11 * GIB, 11 * GIB, "GPU-2b00aa11-93fe")
CURRENT = {"model.path": "demo", "model.gpu": "auto", "model.kv": "auto", "model.context": "auto", "model.slots": "auto",
           "model.backend": "auto", "model.idle_unload": 0.0, "server.host": "127.0.0.1", "server.api_key_file": ""}
FINDINGS = (Finding("PYTHON", "ok", "3.12.4"),
            Finding("GPU-POWER", "warning", "NVIDIA GeForce RTX 4090: limited to 300 of 450 W", "sudo nvidia-smi -i 0 -pl 450"))
FACTS = Facts(FINDINGS, (CARD, OLD), True, (), {("3.6", "q4s"): "owner/qwen3.6-27b-q27:q4s.q27"}, 400 * GIB, True, False, False,
              False, CURRENT, ("claude",))
ANSWERS = {"checks": "go", "card": CARD.uuid, "model": "Qwen3.6-27B", "tier": "q4s", "kv": "fp8", "context": "131072", "slots": "1",
           "fetch": "download:owner/qwen3.6-27b-q27:q4s.q27", "trial": "yes", "idle": "900", "service": "no", "access": "open",
           "clients": "show"}
BUDGET = (("weights", 15_460_818_944), ("KV cache", 4_706_009_088), ("state", 156_913_664), ("scratch", 416_284_672),
          ("runtime", 734_003_200), ("reserve", 2_031_183_104), ("left", 1_727_720_192))
SHOWN = {
    "card": Question("card", "Which card?", (
        Option(CARD.uuid, "0: NVIDIA GeForce RTX 4090, 25.2 GB free", "holds Qwen3.6-27B q4s, 131,072 tokens"),
        Option(OLD.uuid, "1: NVIDIA GeForce RTX 2080 Ti, 11.8 GB free",
               "NVIDIA GeForce RTX 2080 Ti has compute capability 7.5, the kernels need 8.0 or newer.", False),
        Option("cpu", "no card: compute on the CPU", "slow; for trying things out")), CARD.uuid,
        takes="the beginning of a UUID"),
    "context": Question("context", "How long may a conversation be?", (
        Option("131072", "131,072 tokens", "the largest that fits"), Option("65536", "65,536 tokens", "65,536 tokens x 2"),
        Option("262144", "262,144 tokens", "does not fit: 29.1 GB are needed, 25.2 GB are free.", False)),
        "131072", takes="a number of tokens from 2048", budget=BUDGET),
    "review": Question("review", "Write this?", (Option("write", "yes"), Option("leave", "no, leave everything as it was")), "write", (
        "model.gpu = 'GPU-1f3a9c02-7d1e'", "model.kv = 'fp8'", "model.context = 131072", "model.slots = 1",
        "model.idle_unload = 900", "a key file is made, readable by you alone"), budget=BUDGET),
}
"""What the pictures of these steps hold does not change with the plan's arithmetic."""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(facts_module, "read_facts", lambda: FACTS)


async def at_step(screens, step):
    """Take the proposed answers until this step is asked."""
    if screens.app.screen.__class__.__name__ != "Setup":
        await screens.pilot.press("s")
    room = screens.app.screen
    await screens.until(lambda: room.question)
    while room.question.step != step:
        before = room.question.step
        await screens.pilot.press("enter")
        await screens.until(lambda: room.question and room.question.step != before or room.trouble)
        assert not room.trouble
    await screens.pilot.pause()
    return room


@pytest.mark.parametrize("step", [pytest.param("checks", marks=pytest.mark.long), pytest.param("card", marks=pytest.mark.long), "context",
                                  "review"])
async def test_the_form_is_readable_at_every_size(step, monkeypatch, daemon_of, open_screens, same_at_all_sizes):
    trial = lambda wizard: None if "download" in wizard.work else Trial(61.3, 8.0)  # noqa: E731
    async with daemon_of("idle") as daemon, open_screens(daemon, carry_out=trial) as screens:
        room = await at_step(screens, step)
        if step in SHOWN:
            room.wizard, room.question = replace(room.wizard, answers=ANSWERS), SHOWN[step]
            monkeypatch.setattr(room, "_rows", lambda: SHOWN[step].budget)
            room.query_one("#options").choose(SHOWN[step].default)
        await same_at_all_sizes(screens, f"setup-{step}")


async def test_the_bar_shows_the_plan_of_the_answer_under_the_cursor(daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon, (120, 40)) as screens:
        room = await at_step(screens, "context")
        for key in ("up", "down", "down"):
            await screens.pilot.press(key)
            value = room.query_one("#options").chosen.value
            plan = plan_for(room.wizard, context=value)
            assert dict(room._rows())["KV cache"] == plan.memory.num_blocks * plan.memory.block_bytes
        await screens.pilot.press("t", *"4096")
        assert dict(room._rows())["KV cache"] == plan_for(room.wizard, context="4096").memory.num_blocks * plan.memory.block_bytes
        await screens.pilot.press("enter")
        await screens.until(lambda: room.wizard.answers.get("context") == "4096")


async def test_an_answer_that_cannot_be_says_why_and_back_goes_back(daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon, (120, 40)) as screens:
        room = await at_step(screens, "card")
        await screens.pilot.press("down", "enter")
        await screens.until(lambda: "compute capability 7.5" in room.trouble)
        assert "7.5" in screens.text
        assert room.question.step == "card"
        await screens.pilot.press("b")
        await screens.until(lambda: room.question.step == "checks")


async def test_work_is_done_in_a_thread_and_its_failure_is_shown(daemon_of, open_screens):
    may_end, asked = threading.Event(), []

    def carry_out(wizard):
        asked.append(wizard.work)
        print("12% of 15.5 GB")
        may_end.wait(20)
        raise Q27Error("the hub does not answer.")

    async with daemon_of("idle") as daemon, open_screens(daemon, (120, 40), carry_out=carry_out) as screens:
        room = await at_step(screens, "fetch")
        await screens.pilot.press("enter")
        await screens.shows("12% of 15.5 GB")
        assert asked == ["download owner/qwen3.6-27b-q27:q4s.q27"] and room.question is None
        may_end.set()
        await screens.shows("the hub does not answer.")
        assert room.question.step == "fetch"


async def test_the_answers_are_written_once_at_the_end(daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon, (120, 40), carry_out=lambda wizard: Trial(61.3, 8.0)) as screens:
        room = await at_step(screens, "fetch")
        room._take("later")
        await at_step(screens, "review")
        assert not config_path().exists()
        await screens.pilot.press("enter")
        await screens.until(lambda: room.is_written)
        await screens.shows("Written:")
        written = tomllib.loads(config_path().read_text())
        plan = plan_for(room.wizard)
        assert written["model"] == {"gpu": CARD.uuid, "idle_unload": 900} | {key.partition(".")[2]: value for key, value in plan.settings().items()}


async def test_leaving_writes_nothing(daemon_of, open_screens):
    async with daemon_of("idle") as daemon, open_screens(daemon) as screens:
        room = await at_step(screens, "card")
        room._take("cpu")
        await screens.pilot.press("escape")
        await screens.shows("1 card")
        await screens.pilot.press("s")
        assert screens.app.screen is room and room.wizard.answers["card"] == "cpu" and not config_path().exists()
