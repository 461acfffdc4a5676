"""Conversations that survive: crashes, other programs, export and import, files that are not ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from q27app.errors import FileFormatError, Q27Error
from q27app.tui import exchange, history as history_module
from q27app.tui.history import History, end_of, siblings

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def history(tmp_path):
    with History(tmp_path / "history.db") as opened:
        yield opened


def test_a_branch_is_the_way_from_the_leaf_to_the_root(history):
    talk = history.create("t")
    first = history.add(talk, None, "user", "q")
    one = history.add(talk, first, "assistant", "a1")
    two = history.add(talk, first, "assistant", "a2")
    after = history.add(talk, one, "user", "more")
    assert [message.id for message in history.branch(talk)] == [first, one, after]
    messages = history.messages(talk)
    assert [message.id for message in siblings(messages, messages[1])] == [one, two]
    assert end_of(messages, one) == after


def test_search_takes_its_text_as_it_stands(history):
    for text in ("100% sure", "100 sure", "a_b", "axb", "back\\slash"):
        history.add(history.create(text[:1]), None, "user", text)
    found = {wanted: len(history.conversations(wanted)) for wanted in ("100%", "a_b", "\\", "sure", "none of it")}
    assert found == {"100%": 1, "a_b": 1, "\\": 1, "sure": 2, "none of it": 0}


def test_deleting_takes_the_messages_with_it(history):
    talk = history.create("t")
    history.add(talk, None, "user", "q")
    history.delete(talk)
    assert history.messages(talk) == [] and history.conversations() == []


def test_an_answer_without_a_writer_is_interrupted_and_a_fresh_one_is_not(tmp_path, monkeypatch):
    with History(tmp_path / "h.db") as first:
        talk = first.create("t")
        first.add(talk, None, "assistant", "part", state="streaming")
        with History(tmp_path / "h.db") as second:
            assert second.messages(talk)[0].state == "streaming"
        monkeypatch.setattr(history_module.time, "time", lambda now=time.time: now() + history_module.STALE_S + 1)
        with History(tmp_path / "h.db") as second:
            assert second.messages(talk)[0].state == "interrupted"


def test_a_file_that_is_no_history_is_named(tmp_path):
    (tmp_path / "h.db").write_bytes(b"no database at all, just words" * 50)
    with pytest.raises(FileFormatError, match="h.db"):
        History(tmp_path / "h.db")


def test_a_newer_format_is_refused_and_left_alone(tmp_path):
    import sqlite3

    with sqlite3.connect(tmp_path / "h.db") as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(FileFormatError, match="newer"):
        History(tmp_path / "h.db")


def test_only_the_owner_reads_it(history):
    assert history.path.stat().st_mode & 0o077 == 0


WRITER = """
import sys, time
from pathlib import Path
from q27app.tui.history import History
history = History(Path(sys.argv[1]))
talk = history.create("t")
number = history.add(talk, None, "assistant", "", state="streaming")
for count in range(1, 100000):
    history.write(number, "word " * count, "", [], {}, "streaming")
    print(count, flush=True)
"""


def test_kill_9_loses_nothing_that_was_written(tmp_path):
    program = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "h.db")], cwd=REPOSITORY, stdout=subprocess.PIPE)
    told = 0
    while told < 50:
        told = int(program.stdout.readline())
    os.kill(program.pid, signal.SIGKILL)
    rest = program.stdout.read().split()
    program.wait()
    told = int(rest[-1]) if rest else told
    with History(tmp_path / "h.db") as history:
        text = history.messages(1)[0].text
        assert text.count("word ") >= told and text == "word " * text.count("word ")


LINES = st.sampled_from(["word", "", "# head", "<!-- q27app:message {\"role\": \"user\"} -->", "<!-- \\q27app:title {} -->",
                         "<!-- \\\\q27app:x", "<!-- q27app:", "```", " ", "é"])
TEXTS = st.lists(LINES, max_size=5).map("\n".join)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS, TEXTS), min_size=1, max_size=4), st.booleans())
def test_what_was_exported_is_read_back(tmp_path_factory, messages, as_json):
    with History(tmp_path_factory.mktemp("h") / "h.db") as history:
        talk, parent = history.create("title"), None
        for role, text, reasoning in messages:
            parent = history.add(talk, parent, role, text, reasoning=reasoning, calls=[{"name": "f", "arguments": "{}"}], stats={"n": 1})
        conversation = history.conversation(talk)
        text = (exchange.to_json(conversation, history.messages(talk)) if as_json
                else exchange.to_markdown(conversation, history.branch(talk)))
        again = history.branch(exchange.load(history, text, "file"))
        assert [(m.role, m.text, m.reasoning, m.calls, m.stats) for m in again] == [
            (m.role, m.text, m.reasoning, m.calls, m.stats) for m in history.branch(talk)]


@pytest.mark.parametrize("text", [
    "{", "[]", "{}", '{"format": "q27app-conversation", "version": 2}', '{"format": "q27app-conversation", "version": 1}',
    '{"format": "q27app-conversation", "version": 1, "messages": [{"role": "wizard", "text": ""}]}',
    '{"format": "q27app-conversation", "version": 1, "messages": [{"role": "user", "text": "", "parent": 0}]}',
    '{"format": "q27app-conversation", "version": 1, "messages": [], "leaf": 3}', '{"a":' * 50_000, "words", "",
    '<!-- q27app:message {"role": 5} -->\nx', "<!-- q27app:message {]} -->"])
def test_a_file_that_is_no_conversation_is_refused_and_changes_nothing(history, text):
    with pytest.raises(Q27Error, match="talk.md"):
        exchange.load(history, text, "talk.md")
    assert history.conversations() == []
