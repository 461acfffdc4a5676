"""The engine on the real network: a dense checkpoint, whose every logit shows any error of state.

Texts are compared with the log probabilities of the drawn token and the four best: bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.engine.loading import EngineConfig, open_model
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import FileFormatError, OutOfMemory
from q27app.weights.synthetic import synthesize
from tests.engine.toy import Answer, Desk, ScriptedDrafter, TableGuide, mix
from tests.model.runs import Run

PARAMS = {
    "greedy": SamplingParams(logprobs=4, max_tokens=12),
    "drawn": SamplingParams(temperature=0.8, top_p=0.95, seed=42, logprobs=4, max_tokens=12),
    "long": SamplingParams(temperature=0.5, top_k=50, min_p=0.01, frequency_penalty=0.5, seed=1, logprobs=4, max_tokens=12),
    "short": SamplingParams(logprobs=4, max_tokens=12),
}
PROMPTS = {name: tuple(mix(index, place) % 2560 for place in range(length))
           for index, (name, length) in enumerate({"greedy": 70, "drawn": 20, "long": 150, "short": 1}.items())}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("dense") / "dense.q27", wiring="dense")


def desk_of(path, slots=4, chunk=64, drafter=None) -> Desk:
    loaded = open_model(EngineConfig(path, "numpy", context=512, slots=slots, prefill_chunk=chunk), lambda share: None)
    loaded.drafter = drafter
    return Desk(loaded)


def told(answer: Answer) -> list:
    return [entry for event in answer.events for entry in event.logprobs]


def submit(desk: Desk, name: str, guide=None, copy: str = "") -> Answer:
    return desk.submit(Request(name + copy, PROMPTS[name], PARAMS[name], guide))


@pytest.fixture(scope="module")
def alone(dense) -> dict[str, list]:
    """What each request tells when it runs alone, without drafts."""
    desk, answers = desk_of(dense, slots=1), {}
    for name in PROMPTS:
        answers[name] = submit(desk, name)
        desk.run()
        assert len(answers[name].tokens) == 12 and answers[name].finish is FinishReason.LENGTH
    return {name: told(answer) for name, answer in answers.items()}


@pytest.mark.parametrize("chunk", [64, 256])
def test_company_and_chunks_change_no_bit(dense, alone, chunk):
    desk = desk_of(dense, chunk=chunk)
    answers = {name: submit(desk, name) for name in PROMPTS}
    desk.run()
    assert {name: told(answer) for name, answer in answers.items()} == alone


@pytest.mark.parametrize("width", [1, 4, 15])
def test_drafts_change_no_bit(dense, alone, width):
    texts = {name: [entry.token for entry in entries] for name, entries in alone.items()}
    drafter = ScriptedDrafter(texts, lambda name, index: mix(index, width) % 4 > 0, lambda name, index: width)
    desk = desk_of(dense, slots=2, drafter=drafter)
    answers = {name: submit(desk, name) for name in PROMPTS}
    desk.run()
    assert {name: told(answer) for name, answer in answers.items()} == alone
    assert sum(answer.last.stats.num_accepted for answer in answers.values()) > 5


def test_a_stop_inside_an_accepted_run_leaves_the_rest_of_the_engine_as_it_was(dense, alone):
    texts = {name: [entry.token for entry in entries] for name, entries in alone.items()}
    desk = desk_of(dense, slots=2, drafter=ScriptedDrafter(texts))
    stopped = submit(desk, "greedy", TableGuide({4: (True, (), "stop")}))
    others = {name: submit(desk, name) for name in ("drawn", "long")}
    desk.run()
    assert told(stopped) == alone["greedy"][:5] and stopped.finish is FinishReason.STOP
    assert {name: told(answer) for name, answer in others.items()} == {name: alone[name] for name in others}


def test_forced_tokens_are_the_same_with_drafts_and_without(dense, alone):
    forces = {3: (False, tuple(range(20, 24)), None)}
    plain = desk_of(dense, slots=1)
    first = submit(plain, "greedy", TableGuide(forces))
    plain.run()
    script = {"greedy": first.tokens}
    desk = desk_of(dense, slots=1, drafter=ScriptedDrafter(script))
    again = submit(desk, "greedy", TableGuide(forces))
    desk.run()
    assert told(again) == told(first) and first.tokens[3:7] == [20, 21, 22, 23]
    assert again.last.stats.num_steps < first.last.stats.num_steps


def test_prompt_logits_are_those_of_the_model_alone(dense):
    desk = desk_of(dense)
    beside = submit(desk, "drawn")
    answer = desk.submit(Request("logits", PROMPTS["long"], SamplingParams(max_tokens=1), prompt_logits=True))
    desk.run()
    (given,) = [event.prompt_logits for event in answer.events if event.prompt_logits is not None]
    run = Run(dense)
    assert np.array_equal(given, run.feed(PROMPTS["long"]))
    assert answer.tokens == [int(given[-1].argmax())] and beside.finish is FinishReason.LENGTH


def test_a_window_that_does_not_fit_is_refused_before_anything_is_loaded(dense):
    shares = []
    with pytest.raises(OutOfMemory, match="does not fit"):
        open_model(EngineConfig(dense, "numpy", context=1 << 19, slots=4096), shares.append)
    assert shares == []


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "broken.q27").write_bytes(b"not a model")
    with pytest.raises(FileFormatError, match="broken.q27"):
        open_model(EngineConfig(tmp_path / "broken.q27", "numpy"), lambda share: None)


def test_loading_tells_its_progress_and_who_was_loaded(dense):
    shares = []
    loaded = open_model(EngineConfig(dense, "numpy", context=256, slots=1, cache=False), shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 4
    assert loaded.info["tier"] == "q4s" and loaded.info["backend"] == "numpy" and loaded.prefill_chunk == 256
    assert loaded.blocks.num_blocks == loaded.plan.num_blocks == 4
    loaded.close()


@pytest.mark.long
def test_any_interleaving_on_the_dense_model_gives_the_solitary_bits(dense, alone, long_scale):
    texts = {name: [entry.token for entry in entries] for name, entries in alone.items()}

    @settings(max_examples=max(3, int(100 * long_scale)), deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(sorted(PROMPTS)), st.integers(0, 6), st.booleans()), min_size=1, max_size=8),
           st.integers(1, 4), st.booleans())
    def run(actions, slots, has_drafts):
        script = {f"{name}{copy}": texts[name] for copy in range(len(actions)) for name in texts}
        drafter = ScriptedDrafter(script, lambda name, index: mix(index, len(actions)) % 3 > 0) if has_drafts else None
        desk = desk_of(dense, slots=slots, drafter=drafter)
        cancelled = set()
        for copy, (name, steps, is_cancelled) in enumerate(actions):
            submit(desk, name, copy=str(copy))
            for _ in range(steps):
                desk.stepper.step()
            if is_cancelled:
                cancelled.add(f"{name}{copy}")
                desk.cancel(f"{name}{copy}")
        desk.run()
        for key, answer in desk.answers.items():
            expected = alone[key.rstrip("0123456789")]
            assert told(answer) == (expected[:len(answer.tokens)] if key in cancelled else expected)

    run()


def test_passes_started_ahead_change_no_token(dense):
    def prompt_of(length: int, seed: int) -> tuple[int, ...]:
        return tuple(mix(seed, place) % 2560 for place in range(length))

    desk = desk_of(dense)
    desk.model.backend.is_ahead = True
    asked = {f"r{seed}": request for seed, request in enumerate([
        Request("r0", prompt_of(70, 1), SamplingParams(max_tokens=12)), Request("r1", prompt_of(9, 3), SamplingParams(max_tokens=20, temperature=0.9, seed=5)),
        Request("r2", prompt_of(130, 4), SamplingParams(max_tokens=7, temperature=0.7, top_k=20, seed=6))])}
    answers = {name: desk.submit(request) for name, request in asked.items()}
    desk.run()
    for name, request in asked.items():
        lonely = desk_of(dense)
        answer = lonely.submit(request)
        lonely.run()
        assert answers[name].tokens == answer.tokens


class Surprise(TableGuide):
    """Forces ids where it had said that it would not, and is waited for from token 30 on."""

    @property
    def may_divert(self):
        return self.seen >= 30


@pytest.mark.parametrize("length", [70, 130])
@pytest.mark.parametrize("params", [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.9, seed=5)])
def test_what_is_computed_again_after_a_surprise_has_its_bits(dense, length, params):
    """The slot of the finished answer, its text, and the texts beside it."""
    found = []
    for is_ahead in (False, True):
        desk = desk_of(dense, slots=2)
        desk.model.backend.is_ahead = is_ahead
        finish, held = desk.stepper._scheduler.finish, {}

        def look(sequence, *rest):
            held[sequence.request.id] = desk.loaded.state.export_slot(sequence.slot).tobytes(), sequence.num_computed
            finish(sequence, *rest)

        desk.stepper._scheduler.finish = look
        forces = {20: (False, tuple(range(40, 43)), None), 22: (True, (8,), None)}
        prompt = tuple(mix(1, place) % 2560 for place in range(length))
        answer = desk.submit(Request("a", prompt, params, Surprise(forces)))
        other = desk.submit(Request("b", prompt[:50], SamplingParams(max_tokens=45, temperature=0.8, seed=1)))
        desk.run()
        found.append((answer.tokens, other.tokens, held["a"]))
    assert found[0] == found[1]
