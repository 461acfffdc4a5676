"""Twelve turns of an agent through both APIs on a real engine: what the turn before held is hardly computed again.

The model is the engine's toy with a vocabulary of bytes; what it says is forced. With a pause the engine settles each turn
before the next one comes; without one it never settles anything, which is the worst case.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from q27app.chat.template import open_template
from q27app.engine.engine import Engine
from q27app.engine.loading import EngineConfig
from q27app.engine.request import Decision
from q27app.engine.snapshot_cache import SnapshotCache
from tests.daemon.test_streaming import until
from tests.engine import toy

from .agent_script import Agent
from .real_clients import claude_environment, install, run

TURNS = 12
RULES = "You are a careful engineer. " + " ".join(f"Rule {index}: keep file {index * 7} as it is." for index in range(90))
TOOLS = [("read_file", "Reads a file."), ("run_tests", "Runs the tests.")]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}


class Forced:
    """A guide that says a text at once."""

    def __init__(self, tokens):
        self.tokens = tuple(tokens)

    def advance(self, tokens) -> Decision:
        from q27app.chat.guide import Decision as Said

        return Said(0, self.tokens, "stop")

    def mask(self, prefix):
        return None


class ForcedEngine(Engine):
    """say(prompt text) -> what is answered."""

    def __init__(self, tokenizer, say, max_context=32_768) -> None:
        def load(config, progress):
            return toy.load_toy(slots=2, max_context=max_context, chunk=1024,
                                make_cache=lambda loaded: SnapshotCache(loaded.state, loaded.blocks, (), 16 * 200))

        super().__init__(EngineConfig(model="toy.q27", checks_pools=True), load)
        self._tokenizer, self._say = tokenizer, say
        self.prompts: list[tuple[int, ...]] = []
        self.said: list[list[int]] = []
        self.reused: dict[str, int] = {}
        self.asked, self.known = 0, 0
        """Prefixes that the daemon wants settled, and those of which the engine's thread knows."""

    def settle(self, tokens, system_len=0) -> None:
        self.asked += 1
        super().settle(tokens, system_len)

    def submit(self, request, deliver) -> None:
        self.prompts.append(request.prompt)
        self.said.append(self._tokenizer.encode(self._say(self._tokenizer.decode(request.prompt)), control=True))

        def note(event) -> None:
            if event.stats is not None:
                self.reused[request.id] = event.stats.num_cached
            deliver(event)

        super().submit(replace(request, guide=Forced(self.said[-1])), note)


@pytest.fixture
def wide_toy(monkeypatch, tokenizer):
    monkeypatch.setattr(toy, "VOCAB", tokenizer.vocab_size)
    spread = (toy.np.arange(tokenizer.vocab_size, dtype=toy.np.uint64) + toy.np.uint64(1)) * toy.np.uint64(0x9E3779B97F4A7C15)
    monkeypatch.setattr(toy, "SPREAD", spread)


def say(prompt: str) -> str:
    """A call with a little reasoning and text before it; the last turn of four in a loop answers instead."""
    turn = prompt.count("<tool_response>\n") + prompt.count("Next question")
    head = "" if prompt.rstrip().endswith("</think>") else f"I should look at part {turn} of it.\n</think>\n\n"
    if turn % 4 == 3:
        return f"{head}Part {turn} is done, everything in it is as it was."
    call = {"arguments": {"path": f"src/part{turn}.py", "lines": 20 + turn}, "name": "read_file"}
    return f"{head}Looking at part {turn}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def result_of(turn: int) -> str:
    return "\n".join(f"{line}: value_{turn}_{line} = {line * turn}" for line in range(12))


class Messages:
    """A client of /v1/messages. Reasoning is sent back."""

    path = "/v1/messages"

    def __init__(self) -> None:
        self.messages = [{"role": "user", "content": "Please go through the parts."}]

    def body(self) -> dict:
        tools = [{"name": name, "description": text, "input_schema": SCHEMA} for name, text in TOOLS]
        return {"model": "m", "max_tokens": 800, "system": RULES, "tools": tools, "messages": self.messages,
                "thinking": {"type": "enabled", "budget_tokens": 400}}

    def take(self, reply: dict, turn: int) -> None:
        self.messages.append({"role": "assistant", "content": reply["content"]})
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        content = [{"type": "tool_result", "tool_use_id": call["id"], "content": result_of(turn)} for call in calls]
        self.messages.append({"role": "user", "content": content or f"Next question {turn}: what about the rest?"})


class Chat:
    """A client of /v1/chat/completions. Reasoning is dropped."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Please go through the parts."}]

    def body(self) -> dict:
        tools = [{"type": "function", "function": {"name": name, "description": text, "parameters": SCHEMA}}
                 for name, text in TOOLS]
        return {"model": "m", "max_tokens": 800, "tools": tools, "messages": self.messages}

    def take(self, reply: dict, turn: int) -> None:
        message = reply["choices"][0]["message"]
        kept = {"role": "assistant", "content": message.get("content")}
        calls = message.get("tool_calls") or []
        if calls:
            kept["tool_calls"] = [{**call, "function": {**call["function"], "arguments": json.dumps(
                json.loads(call["function"]["arguments"]), sort_keys=True)}} for call in calls]
        self.messages.append(kept)
        for call in calls:
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result_of(turn)})
        if not calls:
            self.messages.append({"role": "user", "content": f"Next question {turn}: what about the rest?"})


@pytest.mark.parametrize("client_type", [Messages, Chat])
@pytest.mark.parametrize("name,pauses", [("json", True), ("qwen3.5", True), ("qwen3.5", False)])
async def test_twelve_turns_reuse_what_the_turn_before_held(start, tokenizer, wide_toy, name, client_type, pauses, capsys):
    template, engine, client = open_template({}, tokenizer, name), ForcedEngine(tokenizer, say), client_type()
    if not pauses:
        engine.settle = lambda tokens, system_len: None
    running = await start(engine=engine, template=template)
    engine.start()
    while engine.status().state != "ready":
        await asyncio.sleep(0.01)
    prepared, reused, held, total = watched(running), 0, 0, 0
    for turn in range(TURNS):
        status, reply = await running.post(client.path, client.body())
        assert status == 200, reply
        client.take(reply, turn)
        cached = num_cached(reply)
        if turn:
            reused, held, total = reused + cached, held + len(before), total + len(engine.prompts[-1])
        before = (*engine.prompts[-1], *engine.said[-1])
        if pauses:
            await until(lambda: len(prepared) > turn and all(work.done() for work in prepared))
            await until(lambda: engine.known == engine.asked and not engine._stepper.has_spare_work)
    with capsys.disabled():
        print(f"\n  {client_type.__name__:8} {name:8} {'pause' if pauses else 'none ':5} reused {reused / held:.1%} of what "
              f"the turn before held, {reused / total:.1%} of all prompt tokens")
    engine.close()
    assert reused / held >= (0.97 if pauses else 0.90)


async def test_a_prompt_that_leaves_the_earlier_text_early_is_explained(start, tokenizer, wide_toy, caplog):
    engine = ForcedEngine(tokenizer, say)
    running = await start(engine=engine, template=open_template({}, tokenizer, "json"))
    engine.start()
    while engine.status().state != "ready":
        await asyncio.sleep(0.01)
    caplog.set_level("INFO", "q27app.requests")
    words = "one two three four five six seven eight nine ten " * 60
    for text in (words, words[:300] + "X" + words[301:], words):
        await running.post("/v1/messages", {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": text}]})
    (line,) = [record.getMessage() for record in caplog.records if "possible tokens" in record.message]
    assert "reason=diverged" in line and "is 'X' (" in line and f"had {words[300]!r} (" in line
    async with running.session.get(running.url + "/metrics") as reply:
        metrics = await reply.text()
    assert 'q27app_prefix_misses_total{reason="diverged"} 1.0' in metrics
    assert "q27app_prefix_snapshots" in metrics and 'q27app_prefix_hits_total{kind=' in metrics
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["json", "qwen3.8"])
async def test_claude_code_reuses_its_own_turns(start, tokenizer, wide_toy, tmp_path_factory, tmp_path, name, capsys):
    program = install("@anthropic-ai/claude-code", tmp_path_factory.mktemp("claude-code"))
    home = tmp_path / "claude-home"
    (home / "work").mkdir(parents=True)
    note = home / "work" / "note.txt"
    note.write_text("size = 3\n" * 40)
    template = open_template({}, tokenizer, name)
    agent = Agent(tokenizer, template.dialect, "Read", [
        ("I read it.", "Read", {"file_path": str(note)}),
        ("Now I count.", "Bash", {"command": "wc -l < note.txt", "description": "counts"}),
        ("And once more.", "Bash", {"command": "cat note.txt", "description": "shows"}),
    ], "All done.")

    def say(prompt: str) -> str:
        request = type("Asked", (), {"prompt": tokenizer.encode(prompt)})
        return "".join(step for step in agent.answer(request) if isinstance(step, str))

    engine = ForcedEngine(tokenizer, say, max_context=400_000)
    running = await start(engine=engine, template=template)
    engine.start()
    code, out, err = await run([program, "-p", "look at it", "--allowedTools", "Read", "Bash"], home / "work",
                               claude_environment(running.url, home))
    assert (code, out.strip()) == (0, "All done."), err
    turns = [(prompt, said, cached) for prompt, said, cached in zip(
        engine.prompts, engine.said, engine.reused.values(), strict=True) if len(prompt) > 20_000]
    held = [len(prompt) + len(said) for prompt, said, _ in turns[:-1]]
    reused = [cached for _, _, cached in turns[1:]]
    with capsys.disabled():
        print(f"\n  Claude Code {name}: prompts {[len(prompt) for prompt, _, _ in turns]}, held {held}, reused {reused}: "
              f"{sum(reused) / sum(held):.1%}")
    engine.close()
    assert len(turns) == agent.num_turns == 4 and sum(reused) >= 0.9 * sum(held)


def watched(running) -> list:
    """What the daemon does to prepare next turns, one future a turn; the engine counts what it learns of it."""
    prepared, submit, settle = [], running.daemon.executor.submit, running.engine._stepper.settle

    def note(work, *arguments):
        future = submit(work, *arguments)
        if getattr(work, "__name__", "") == "_settle":
            prepared.append(future)
        return future

    def learn(*arguments) -> None:
        settle(*arguments)
        running.engine.known += 1

    running.daemon.executor.submit, running.engine._stepper.settle = note, learn
    return prepared


def num_cached(reply: dict) -> int:
    usage = reply["usage"]
    if "prompt_tokens_details" in usage:
        return usage["prompt_tokens_details"]["cached_tokens"]
    return usage["cache_read_input_tokens"]
