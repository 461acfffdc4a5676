"""The chat screen on a scripted daemon: what streams, what is kept, what the commands do."""

from __future__ import annotations

import asyncio
import base64
import json
import re

import pytest
from aiohttp import web
from textual.events import Paste

from q27app.tui.clipboard import copy_sequence
from q27app.tui.history import History

MARKDOWN = "# Title\n\nSome *text* with `code`.\n\n- one\n- two\n\n```python\nprint('hi')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nEnd."


@pytest.fixture
async def chat(daemon_of, open_screens):
    """(screens, daemon) with the chat in front at 80x24."""
    async with daemon_of("idle") as daemon, open_screens(daemon, first="chat") as screens:
        await screens.shows("Ask something")
        yield screens, daemon


async def answered(screens) -> None:
    await screens.until(lambda: screens.app.screen.answer is None and not screens.app.screen.prompt.text)


def kept(tmp_path):
    """Messages of the only conversation, all branches."""
    with History(tmp_path / "history.db") as history:
        (conversation,) = history.conversations()
        return history.messages(conversation.id)


async def test_an_answer_streams_is_kept_and_has_its_figures(chat, tmp_path):
    screens, daemon = chat
    daemon.script = lambda body: list(MARKDOWN)
    daemon.usage = {"prompt_tokens": 20, "completion_tokens": 41, "prompt_tokens_details": {"cached_tokens": 16}}
    await screens.say("Say much\nplease")
    await screens.shows("41 tokens")
    await screens.shows("16 prompt tokens reused")
    assert "**" not in screens.text and "print('hi')" in screens.text
    assert screens.app.screen.entries[-1].source == MARKDOWN
    question, answer = kept(tmp_path)
    assert (question.role, question.text) == ("user", "Say much\nplease")
    assert (answer.text, answer.state, answer.parent) == (MARKDOWN, "done", question.id)
    assert daemon.asked[0]["messages"] == [{"role": "user", "content": "Say much\nplease"}]


async def test_a_conversation_is_readable_at_every_size(daemon_of, open_screens, same_at_all_sizes, tmp_path, clock):
    with History(tmp_path / "history.db") as history:
        talk = history.create("How do I read a file?")
        first = history.add(talk, None, "user", "How do I read a file?")
        stats = {"num_generated": 120, "tokens_per_s": 171.2, "first_token_ms": 240, "reasoning_s": 2.5, "num_reasoning": 40}
        answer = history.add(talk, first, "assistant", MARKDOWN, reasoning="hm", stats=stats | {"model": "Qwen3.6-27B"})
        second = history.add(talk, answer, "user", "And now call the tool, please.")
        history.add(talk, second, "assistant", "", calls=[{"name": "read", "arguments": '{"path": "a.txt"}'}], state="stopped")
    async with daemon_of("idle") as daemon, open_screens(daemon, first="chat", clock=clock) as screens:
        await screens.shows("Ask something")
        await screens.pilot.press("f2")
        await screens.shows("How do I read a file?")
        await screens.pilot.press("enter")
        await screens.shows("call read")
        await screens.pilot.press("f2")
        await same_at_all_sizes(screens, "chat")


async def test_the_next_question_carries_the_conversation(chat):
    screens, daemon = chat
    for question in ("one", "two"):
        await screens.say(question)
        await screens.until(lambda: screens.app.screen.answer is None and len(daemon.asked) >= 1)
        await answered(screens)
    assert [message["content"] for message in daemon.asked[-1]["messages"]] == ["one", "Hello there", "two"]


async def test_reasoning_is_folded_and_not_drawn_until_it_is_opened(chat):
    screens, daemon = chat
    daemon.script = lambda body: [{"reasoning_content": "deep thoughts"}, 0.05, "The answer."]
    daemon.usage = {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 5}}
    await screens.say("think")
    await screens.shows("The answer.")
    await screens.until(lambda: re.search(r"thought \d+\.\d s, 5 tokens", screens.text))
    assert "deep thoughts" not in screens.text
    await screens.pilot.press("f4")
    await screens.shows("deep thoughts")
    await screens.pilot.press("f4")
    await screens.until(lambda: "deep thoughts" not in screens.text)


async def test_tool_calls_are_shown_to_be_read(chat):
    screens, daemon = chat
    daemon.script = lambda body: [
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "read_file", "arguments": '{"path": "a.'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'txt", "lines": [1, 2]}'}}]}]
    await screens.say("read it")
    await screens.shows("call read_file")
    await screens.shows("path: a.txt")
    assert "lines: [1, 2]" in screens.text


async def test_escape_stops_keeps_the_part_and_ends_the_request(chat, tmp_path):
    screens, daemon = chat
    daemon.script = lambda body: ["a part", 600.0, "never"]
    await screens.say("go")
    await screens.shows("a part")
    await screens.pilot.press("escape")
    await screens.shows("stopped by you")
    assert [(message.text, message.state) for message in kept(tmp_path)] == [("go", "done"), ("a part", "stopped")]
    await screens.pilot.press("escape")
    await screens.shows("1 card")


async def test_a_failure_puts_the_question_back(chat, tmp_path):
    screens, daemon = chat
    daemon.script = lambda body: web.json_response({"error": {"message": "the queue of 64 is full."}}, status=503)
    await screens.say("precious words")
    await screens.shows("the queue of 64 is full")
    assert screens.app.screen.prompt.text == "precious words"
    assert kept(tmp_path) == []


async def test_an_answer_that_breaks_off_is_kept_as_failed(chat, tmp_path):
    screens, daemon = chat

    def script(body):
        yield "half of"
        raise ConnectionResetError

    daemon.script = script
    await screens.say("go")
    await screens.shows("failed:")
    assert kept(tmp_path)[-1].text == "half of" and kept(tmp_path)[-1].state == "failed"


async def test_retry_edit_and_branch_make_a_tree(chat, tmp_path):
    screens, daemon = chat
    daemon.script = lambda body: [f"answer {len(daemon.asked)}"]
    await screens.say("first")
    await screens.shows("answer 1")
    await answered(screens)
    await screens.pilot.press("f5")
    await screens.shows("answer 2")
    await answered(screens)
    await screens.shows("branch 2 of 2")
    await screens.pilot.press("f6")
    assert screens.app.screen.prompt.text == "first"
    await screens.say("first, changed")
    await screens.shows("answer 3")
    await answered(screens)
    assert daemon.asked[-1]["messages"] == [{"role": "user", "content": "first, changed"}]
    await screens.say("/branch")
    await screens.shows("answer 2")
    assert [message.parent for message in kept(tmp_path)] == [None, 1, 1, None, 4]


async def test_settings_go_into_the_request(chat):
    screens, daemon = chat
    for line in ("/set temperature 0.7", "/set seed 5", "/set seed", "/think on", "/system Be brief."):
        await screens.say(line)
    await screens.shows("temperature 0.7")
    await screens.say("hi")
    await answered(screens)
    await screens.until(lambda: daemon.asked)
    body = daemon.asked[0]
    assert (body["temperature"], body["enable_thinking"], "seed" in body) == (0.7, True, False)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


async def test_a_wrong_command_says_what_is_right(chat):
    screens, daemon = chat
    for line, wanted in (
        ("/set temperature hot", "expected a number"), ("/set warmth 1", "no setting"), ("/nonsense", "no command"), ("/s", "not clear"),
        ("/export notes.txt", "there is no conversation yet"), ("/import /nowhere.json", "cannot be read"),
        ("/think maybe", "expected on"), ("/find nothing", "is not in this"), ("/retry", "there is no conversation yet"),
    ):
        screens.app.screen.notes = []
        await screens.say(line)
        await screens.until(lambda: wanted in " ".join(screens.text.split()))
    assert daemon.asked == []


async def test_export_and_import_bring_the_conversation_back(chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    screens, daemon = chat
    await screens.say("keep me")
    await answered(screens)
    await screens.shows("2 tokens")
    for name in ("talk.json", "talk.md"):
        await screens.say(f"/export {name}")
        await screens.say("/new")
        await screens.say(f"/import {name}")
        await screens.shows("Hello there")
        await screens.shows("keep me")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][1]["text"] == "Hello there"


async def test_conversations_are_listed_searched_and_opened(chat):
    screens, daemon = chat
    for question in ("about apples", "about pears"):
        await screens.say(question)
        await answered(screens)
        await screens.shows("2 tokens")
        await screens.say("/new")
    await screens.say("/search apples")
    await screens.shows("conversations")
    assert "about pears" not in screens.text
    await screens.pilot.press("enter")
    await screens.shows("Hello there")
    assert screens.app.screen.conversation.title == "about apples"


async def test_enter_sends_and_ctrl_j_and_paste_do_not(chat):
    screens, daemon = chat
    prompt = screens.app.screen.prompt
    await screens.pilot.press("a", "ctrl+j", "b")
    assert prompt.text == "a\nb"
    screens.app.post_message(Paste("c\nd\n"))
    await screens.until(lambda: prompt.text == "a\nbc\nd\n")
    assert daemon.asked == []
    await screens.pilot.press("enter")
    await screens.until(lambda: daemon.asked)
    assert daemon.asked[0]["messages"][0]["content"] == "a\nbc\nd\n"


async def test_scrolling_up_stops_following_and_the_chip_tells(chat):
    screens, daemon = chat
    go_on = asyncio.Event()
    daemon.script = lambda body: ["line\n\n" * 60, go_on, "THE END"]
    await screens.say("long")
    await screens.shows("line")
    await screens.until(lambda: screens.app.screen.transcript.max_scroll_y > 20)
    await screens.pilot.press("pageup", "pageup")
    go_on.set()
    await screens.shows("new text")
    place = screens.app.screen.transcript.scroll_offset.y
    await answered(screens)
    assert screens.app.screen.transcript.scroll_offset.y == place and "THE END" not in screens.text
    await screens.pilot.press("ctrl+end")
    await screens.shows("THE END")
    assert "new text" not in screens.text


async def test_control_characters_of_the_model_do_not_reach_the_terminal(chat):
    screens, daemon = chat
    daemon.script = lambda body: ["a\x1b]0;evil\x07b", "\n\n```\n\x1b[2J\n```\n"]
    await screens.say("go")
    await answered(screens)
    await screens.shows("2 tokens")
    assert "\x1b" not in screens.text and "\x07" not in screens.text


def test_a_copy_is_osc_52_and_in_tmux_also_wrapped():
    code = base64.b64encode("é\n".encode()).decode()
    assert copy_sequence("é\n", False) == f"\x1b]52;c;{code}\x07"
    wrapped = copy_sequence("é\n", True)
    assert wrapped == f"\x1b]52;c;{code}\x07\x1bPtmux;\x1b\x1b]52;c;{code}\x07\x1b\\"


async def test_copy_gives_the_answer_or_its_code(chat):
    screens, daemon = chat
    daemon.script = lambda body: ["Look:\n\n```py\nx = 1\ny = 2\n```\nDone."]
    await screens.say("code")
    await answered(screens)
    await screens.shows("2 tokens")
    await screens.say("/copy code")
    assert screens.app.clipboard == "x = 1\ny = 2"
    await screens.pilot.press("f7")
    assert screens.app.clipboard.startswith("Look:")
