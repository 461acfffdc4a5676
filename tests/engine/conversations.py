"""Random conversations against a prefix cache: prompts, forks, edits, cancels, settling, evictions, restarts.

`play` drives desks through a list of actions and compares each finished answer with the cold, solitary one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from q27app.engine.request import FinishReason, Request, SamplingParams
from tests.engine.toy import Answer, Desk, mix

PARAMS = (
    SamplingParams(max_tokens=6, logprobs=3),
    SamplingParams(max_tokens=5, logprobs=3, temperature=0.9, top_p=0.95, seed=77),
    SamplingParams(max_tokens=3, logprobs=3, temperature=0.6, top_k=20, seed=5, frequency_penalty=0.5),
)


@dataclass(frozen=True)
class Action:
    """kind: "new", "extend" (an earlier prompt, its answer and more), "fork" (a beginning of one and more), "edit" (one token
    in the middle changed), "again". which, size, place: what of it; steps: passes until the next action."""

    kind: str
    which: int
    size: int
    place: int
    params: int
    steps: int
    cancels: bool
    settles: bool
    restarts: bool


def actions(max_tokens: int, max_size: int = 7) -> Any:
    """Lists of actions; max_tokens: of the new part of a prompt."""
    kinds = st.sampled_from(["new", "extend", "extend", "fork", "edit", "again"])
    rarely = st.integers(0, 5).map(lambda value: value == 0)
    one = st.builds(Action, kinds, st.integers(0, 50), st.integers(1, max_tokens), st.integers(0, 1000),
                    st.integers(0, len(PARAMS) - 1), st.sampled_from([0, 1, 2, 5, 60]), rarely, st.booleans(), rarely)
    return st.lists(one, min_size=2, max_size=max_size)


def prompt_of(action: Action, history: list[tuple[int, ...]], vocab: int, limit: int) -> tuple[int, ...]:
    """The prompt of an action. history: token runs of earlier requests, answers included."""
    fresh = tuple(mix(action.which, place) % vocab for place in range(action.size))
    if action.kind == "new" or not history:
        return fresh
    base = history[action.which % len(history)]
    cut = action.place % len(base)
    if action.kind == "again":
        return base[:limit]
    if action.kind == "edit":
        return (base[:cut] + ((base[cut] + 1) % vocab,) + base[cut + 1:])[:limit]
    return ((base if action.kind == "extend" else base[:cut]) + fresh)[:limit]


def told(answer: Answer) -> list:
    """Tokens with their log probabilities."""
    return [entry for event in answer.events for entry in event.logprobs]


def settle_all(desk: Desk) -> None:
    """Let the spare work end."""
    for _ in range(2000):
        if not desk.stepper.has_work and not desk.stepper.has_spare_work:
            return
        desk.stepper.step()
    raise AssertionError("spare work does not end")


def play(todo: list[Action], open_desk: Callable[[], Desk], cold: Callable[[Request], list], vocab: int, limit: int,
         keeps_alive: Callable[[int], bool] = lambda index: True) -> int:
    """Run the actions; returns how many prompt tokens were reused. open_desk: a desk with a fresh memory."""
    desk, history, num_reused, name = open_desk(), [], 0, 0
    pending: list[tuple[Request, Answer, bool]] = []

    def finish() -> None:
        nonlocal num_reused
        desk.run()
        for request, answer, is_cancelled in pending:
            expected = cold(request)
            got = told(answer)
            assert got == (expected[:len(got)] if is_cancelled else expected), f"{request.prompt} {request.params}"
            assert is_cancelled or answer.finish is FinishReason.LENGTH
            num_reused += answer.last.stats.num_cached
            history.append(request.prompt + tuple(answer.tokens))
        pending.clear()

    for action in todo:
        if action.restarts:
            finish()
            settle_all(desk)
            close(desk)
            desk = open_desk()
            if action.settles:
                settle_all(desk)   # what comes from disk is there before anybody asks
        prompt = prompt_of(action, history, vocab, limit)
        marks = {"stable_len": max(0, len(prompt) - 3), "system_len": len(prompt) // 3, "turn_len": len(prompt) * 2 // 3}
        request = Request(f"q{name}", prompt, PARAMS[action.params], **marks)
        name += 1
        answer = desk.submit(request)
        pending.append((request, answer, action.cancels))
        for _ in range(action.steps):
            desk.stepper.step()
        if action.cancels:
            desk.cancel(request.id)
        if action.settles:
            desk.stepper.settle(prompt + tuple(answer.tokens), 0)
        if action.steps == 60:
            finish()
            settle_all(desk) if action.settles else desk.stepper.step()
    finish()
    settle_all(desk)
    close(desk)
    return num_reused


def close(desk: Desk) -> None:
    """Pools are empty once the cache has given everything back."""
    desk.stepper.end_spare()
    cache = desk.loaded.prefix_cache
    cache.close()
    assert desk.loaded.slots.num_free == desk.loaded.slots.num_slots
    assert desk.loaded.blocks.num_free == desk.loaded.blocks.num_blocks
