"""Who runs when: chunks, rounds, admission, cancels, faults; and that slots and blocks always come back."""

from __future__ import annotations

import numpy as np
import pytest

from q27app.engine.prefix_cache import Match
from q27app.engine.pace import PrefillPace
from q27app.engine.request import FinishReason, Request, SamplingParams
from q27app.errors import BadRequest, ContextTooLong, EngineDied, GpuError, OutOfMemory, Q27Error
from tests.engine.toy import VOCAB, Desk, ScriptedDrafter, TableGuide, expected_text, load_toy, mix


def prompt_of(length, seed=3):
    return tuple(mix(seed, index) % VOCAB for index in range(length))


def spans(desk, slot=0, phase="prefill"):
    """(first, past the last) position of each pass of one slot."""
    out = []
    for batch in desk.model.passes:
        for seq in np.flatnonzero(batch.slots == slot):
            if batch.phase == phase:
                rows = batch.positions[batch.row_starts[seq]:batch.row_starts[seq + 1]]
                out.append((int(rows[0]), int(rows[-1]) + 1))
    return out


@pytest.mark.parametrize("chunk", [64, 192])
def test_chunks_end_at_absolute_multiples_of_the_chunk_size(chunk):
    desk = Desk(chunk=chunk)
    desk.ask(prompt_of(450), 1)
    desk.run()
    ends = [end for _, end in spans(desk)]
    assert ends == [*range(chunk, 450, chunk), 450]


def test_short_prompts_share_a_pass_and_long_ones_take_turns():
    desk = Desk(slots=4, chunk=128)
    for length in (300, 40, 50, 260):
        desk.ask(prompt_of(length), 1)
    desk.run()
    prefills = [(batch.slots.tolist(), np.diff(batch.row_starts).tolist()) for batch in desk.model.passes]
    assert prefills == [([0], [128]), ([1, 2], [40, 50]), ([3], [128]), ([0], [128]), ([3], [128]), ([0, 3], [44, 4])]


def test_a_running_stream_waits_for_one_chunk_at_most():
    desk = Desk(slots=20, chunk=64)
    for seed in range(18):
        desk.ask(prompt_of(5, seed), 40)
    for _ in range(8):
        desk.stepper.step()
    desk.ask(prompt_of(400), 1)
    desk.ask(prompt_of(300), 1)
    desk.model.passes.clear()
    while any(batch.num_rows == 64 for batch in desk.model.passes[-6:]) or len(desk.model.passes) < 6:
        desk.stepper.step()
    phases = "".join("P" if batch.phase == "prefill" else "d" for batch in desk.model.passes)
    assert "PP" not in phases and phases.count("P") >= 9 and "PddP" in phases
    desk.run()


def test_a_request_waits_for_blocks_in_order_and_nobody_overtakes_it():
    desk = Desk(load_toy(slots=4, max_context=256, num_blocks=4))
    large, larger, small = desk.ask(prompt_of(100), 100), desk.ask(prompt_of(100), 150), desk.ask(prompt_of(5), 5)
    desk.stepper.step()
    assert [desk.sequences[name].status.value for name in ("r0", "r1", "r2")] == ["prefill", "waiting", "waiting"]
    desk.run()
    assert [len(answer.tokens) for answer in (large, larger, small)] == [100, 150, 5]


def test_an_admitted_request_holds_the_blocks_of_its_whole_answer():
    desk = Desk(max_context=512)
    desk.ask(prompt_of(65), 63)
    desk.stepper.step()
    assert len(desk.sequences["r0"].blocks) == 2
    desk.run()


def test_a_request_that_never_fits_ends_with_an_error_instead_of_waiting_for_ever():
    desk = Desk(load_toy(slots=1, max_context=256, num_blocks=2))
    answer, other = desk.ask(prompt_of(100), 100), desk.ask(prompt_of(3), 3)
    desk.run()
    assert isinstance(answer.last.error, OutOfMemory) and "needs 1 slot and 4 KV blocks" in str(answer.last.error)
    assert other.finish is FinishReason.LENGTH


@pytest.mark.parametrize("count", [0, 1, 2])
def test_max_tokens_is_exact(count):
    desk = Desk()
    answer = desk.ask(prompt_of(70), count)
    desk.run()
    assert answer.tokens == expected_text(prompt_of(70), 2)[:count] and answer.finish is FinishReason.LENGTH


def test_the_window_ends_the_answer_at_its_last_position():
    desk = Desk(max_context=100)
    answer, full = desk.ask(prompt_of(90), 50), desk.ask(prompt_of(100), 0)
    desk.run()
    assert answer.tokens == expected_text(prompt_of(90), 10) and answer.finish is FinishReason.LENGTH
    assert full.finish is FinishReason.LENGTH


@pytest.mark.parametrize("length, count", [(100, 1), (101, 0), (500, 10)])
def test_a_prompt_that_leaves_no_room_is_refused(length, count):
    with pytest.raises(ContextTooLong, match=rf"{length} tokens > {100 - (count > 0)} maximum"):
        Desk(max_context=100).ask(prompt_of(length), count)


@pytest.mark.parametrize("params", [
    {"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": 1.5}, {"min_p": float("inf")}, {"top_k": 1 << 40},
    {"top_k": 1.5}, {"seed": 1 << 64}, {"logprobs": -1}, {"logprobs": 1000}, {"presence_penalty": "1"},
    {"frequency_penalty": 1e30}, {"max_tokens": -1}, {"max_tokens": True}])
def test_values_that_no_draw_can_use_are_refused_by_name(params):
    with pytest.raises(BadRequest) as caught:
        Desk().submit(Request("a", (1, 2), SamplingParams(**params)))
    assert caught.value.param == next(iter(params)) and next(iter(params)) in str(caught.value)


@pytest.mark.parametrize("prompt", [(), (1, VOCAB), (-1,)])
def test_prompts_outside_the_vocabulary_are_refused(prompt):
    with pytest.raises(BadRequest):
        Desk().ask(prompt)


def test_extreme_but_legal_values_run():
    desk = Desk()
    answer = desk.ask((1, 2), 5, temperature=1e6, top_k=(1 << 31) - 1, seed=-(1 << 63), logprobs=128,
                      presence_penalty=-1e6, frequency_penalty=1e6)
    desk.run()
    assert len(answer.tokens) == 5


def test_a_cancel_while_queued_prefilling_and_running_frees_slot_and_blocks_at_once():
    desk = Desk(slots=2, chunk=64)
    running, prefilling, queued = desk.ask(prompt_of(5), 200), desk.ask(prompt_of(400), 5), desk.ask(prompt_of(5), 5)
    for _ in range(6):
        desk.stepper.step()
    assert [sequence.status.value for sequence in desk.sequences.values()] == ["decode", "prefill", "waiting"]
    for name in ("r2", "r1", "r0"):
        desk.cancel(name)
        desk.cancel(name)
    assert desk.loaded.slots.num_free == 2 and desk.loaded.blocks.num_free == desk.loaded.blocks.num_blocks
    desk.run()
    for answer in (running, prefilling, queued):
        assert answer.finish is FinishReason.CANCELLED
    assert running.tokens and running.last.stats.num_generated == len(running.tokens)


def test_a_cancel_in_the_middle_of_a_round_takes_the_sequence_out_of_it():
    desk = Desk(slots=20, max_context=64)
    answers = {seed: desk.ask(prompt_of(3, seed), 30) for seed in range(20)}
    while any(sequence.num_generated < 3 for sequence in desk.sequences.values()) or desk.model.passes[-1].num_rows < 16:
        desk.stepper.step()
    served = set(desk.model.passes[-1].slots.tolist())
    late = next(seed for seed in range(20) if desk.sequences[f"r{seed}"].slot not in served)
    desk.cancel(f"r{late}")
    desk.run()
    for seed, answer in answers.items():
        assert answer.finish is (FinishReason.CANCELLED if seed == late else FinishReason.LENGTH)
        assert seed == late or answer.tokens == expected_text(prompt_of(3, seed), 30)


def test_a_receiver_that_raises_loses_its_request_and_nobody_else():
    calls = []

    def deliver(event):
        calls.append(event)
        if event.tokens:
            raise RuntimeError("the loop has gone")

    desk = Desk(slots=2)
    desk.submit(Request("bad", prompt_of(5)), deliver)
    good = desk.ask(prompt_of(9), 30)
    while desk.stepper.has_work:
        desk.stepper.step()
    assert [event.finish for event in calls if event.finish] == [FinishReason.CANCELLED]
    assert good.tokens == expected_text(prompt_of(9), 30)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_step_is_delivered_while_the_device_computes_the_next_one(is_ahead):
    desk = Desk(slots=1)
    desk.model.backend.is_ahead = is_ahead
    known: list[int] = []
    answer = desk.submit(Request("r", prompt_of(5), SamplingParams(max_tokens=6)))
    desk.model.before = lambda batch: known.append(len(answer.tokens))
    desk.run()
    assert known == ([0, 1, 1, 1, 2, 3] if is_ahead else [0, 1, 2, 3, 4, 5])
    assert answer.tokens == expected_text(prompt_of(5), 6)


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_an_error_in_a_pass_ends_the_requests_of_that_pass_only(phase):
    text = expected_text(prompt_of(5), 60)
    desk = Desk(slots=2, drafter=ScriptedDrafter({"r0": text} if phase == "verify" else {}))

    def fail(batch):
        if batch.phase == phase:
            desk.model.before = lambda batch: None
            raise Q27Error("this pass failed.")

    desk.model.before = fail
    first = desk.ask(prompt_of(5), 60)
    while first.finish is None:
        desk.stepper.step()
    second = desk.ask(prompt_of(200), 60)
    desk.run()
    assert first.finish is FinishReason.ERROR and "this pass failed" in str(first.last.error)
    assert second.tokens == expected_text(prompt_of(200), 60)


@pytest.mark.parametrize("error", [GpuError("gone."), EngineDied("x"), ZeroDivisionError()])
def test_an_error_that_may_have_touched_more_is_passed_on(error):
    desk = Desk()
    desk.ask(prompt_of(5), 5)

    def fail(batch):
        raise error

    desk.model.before = fail
    with pytest.raises(type(error)):
        desk.stepper.step()


def test_progress_is_told_after_every_chunk_before_the_first_token():
    desk = Desk(chunk=64)
    answer = desk.ask(prompt_of(150), 3)
    desk.run()
    assert [event.prefilled for event in answer.events] == [0, 64, 128, 150, None, None, None, None]
    assert [len(event.tokens) for event in answer.events] == [0, 0, 0, 0, 1, 1, 1, 0]


class ToyCache:
    """Snapshots at the stops it asks for and at chunk ends: blocks shared, the slot's value kept by itself."""

    def __init__(self, loaded):
        self.loaded, self.kept, self.is_failing = loaded, {}, False

    def prepares(self, request, wait_s):
        return False

    def match(self, request):
        fitting = [tokens for tokens in self.kept if tokens == request.prompt[:len(tokens)] and len(tokens) < len(request.prompt)]
        if not fitting:
            return None
        blocks, value = self.kept[max(fitting, key=len)]

        def restore(slot):
            if self.is_failing:
                raise Q27Error("the snapshot is damaged.")
            self.loaded.state.set_slot(slot, value)

        return Match(len(max(fitting, key=len)), blocks, restore)

    def stops(self, request):
        return (64, 192)

    def lend(self, sequence, positions):
        return []

    def computed(self, sequence):
        tokens = tuple(sequence.tokens[:sequence.num_computed])
        if len(tokens) % 64 == 0 and tokens not in self.kept:
            blocks = sequence.blocks[:len(tokens) // 64].copy()
            self.loaded.blocks.share(blocks)
            self.kept[tokens] = blocks, self.loaded.state.get_slot(sequence.slot)

    def ended(self, sequence, reason):
        assert sequence.slot >= 0

    has_spare_work = False

    def reclaim(self, num_blocks, num_slots):
        while self.kept and self.loaded.blocks.num_free < num_blocks:
            blocks, _ = self.kept.pop(next(iter(self.kept)))
            self.loaded.blocks.release(blocks)

    def owned_blocks(self):
        return [blocks for blocks, _ in self.kept.values()]

    def owned_slots(self):
        return []


def test_reused_prefixes_change_no_text_and_are_counted():
    desk = Desk(slots=2, chunk=256, make_cache=ToyCache)
    base = prompt_of(300)
    prompts = [base, base, base[:200] + (1, 2), base[:100], base[:64], base[:65], base + prompt_of(50, 8)]
    for prompt in prompts:
        answer = desk.ask(prompt, 20)
        desk.run()
        assert answer.tokens == expected_text(prompt, 20)
    cached = [desk.answers[f"r{index}"].last.stats.num_cached for index in range(len(prompts))]
    assert cached == [0, 192, 192, 64, 0, 64, 192]
    assert [end for _, end in spans(desk)][:3] == [64, 192, 300]


def test_snapshots_give_way_to_requests_that_need_their_blocks():
    desk = Desk(load_toy(slots=2, max_context=256, num_blocks=6, chunk=64, make_cache=ToyCache))
    for seed in (0, 0, 1, 1, 2, 2, 0, 0):
        answer = desk.ask(prompt_of(150, seed), 60)
        desk.run()
        assert answer.tokens == expected_text(prompt_of(150, seed), 60)
    desk.ask(prompt_of(150, 5), 60), desk.ask(prompt_of(100, 6), 60)
    desk.run()
    assert all(answer.finish is FinishReason.LENGTH for answer in desk.answers.values())
    assert [answer.last.stats.num_cached for answer in desk.answers.values()] == [0, 128] * 4 + [0, 0]


def test_a_snapshot_that_cannot_be_restored_ends_its_request_only():
    desk = Desk(slots=2, make_cache=ToyCache)
    desk.ask(prompt_of(150), 5)
    desk.run()
    desk.loaded.prefix_cache.is_failing = True
    bad, good = desk.ask(prompt_of(150), 5), desk.ask(prompt_of(30, 9), 5)
    desk.run()
    assert bad.finish is FinishReason.ERROR and "damaged" in str(bad.last.error)
    assert good.tokens == expected_text(prompt_of(30, 9), 5)


def test_a_request_that_wants_no_cache_or_prompt_logits_computes_everything():
    desk = Desk(make_cache=ToyCache)
    for index, options in enumerate([{}, {"cache": False}, {"prompt_logits": True}]):
        desk.submit(Request(f"r{index}", prompt_of(150), SamplingParams(max_tokens=2), **options))
        desk.run()
        assert desk.answers[f"r{index}"].last.stats.num_cached == 0


def test_stats_tell_steps_and_times():
    desk = Desk(drafter=ScriptedDrafter({"r0": expected_text(prompt_of(5), 31)}))
    answer = desk.ask(prompt_of(5), 31)
    desk.run()
    stats = answer.last.stats
    assert (stats.num_prompt, stats.num_generated, stats.num_steps) == (5, 31, 2)
    assert (stats.num_drafted, stats.num_accepted) == (28, 28)
    assert min(stats.queue_ms, stats.prefill_ms, stats.decode_ms) >= 0
    counters = desk.meter.counters()
    assert counters["prompt_tokens"] == 5 and counters["generated_tokens"] == 31 and counters["accepted_tokens"] == 28


def test_a_guide_that_fails_at_the_first_token_ends_the_request_before_its_last_chunk():
    class Bad(TableGuide):
        def mask(self, prefix):
            raise ValueError("no mask")

    desk = Desk(slots=2, chunk=64)
    bad = desk.ask(prompt_of(100), 5, guide=Bad())
    good = desk.ask(prompt_of(100), 5)
    desk.run()
    assert bad.finish is FinishReason.ERROR and bad.tokens == [] and good.tokens == expected_text(prompt_of(100), 5)


def test_a_chunk_beside_running_streams_is_as_long_as_its_measured_price_allows():
    pace = PrefillPace()
    assert pace.chunk(1024, 90) == 64
    pace.record(1024, 256)
    assert pace.chunk(1024, 90) == 320 and pace.chunk(128, 90) == 128
    pace.record(10, 1000)
    assert pace.chunk(1024, 90) == 320
    for size in range(128, 1025, 64):
        pace.record(size, 256)
    assert pace.chunk(1024, 90) == 64


def test_the_pace_knows_that_a_pass_has_a_price_of_its_own():
    pace = PrefillPace()
    pace.record(64, 41)
    assert pace.chunk(1024, 90) == 128, "at most twice what was measured"
    pace.record(128, 50)
    assert pace.chunk(1024, 90) == 256
    pace.record(256, 75)
    assert pace.chunk(1024, 90) == 320
    for _ in range(20):
        pace.record(320, 100)
    assert pace.chunk(1024, 90) == 256, "prices change as the context grows"
    pace.record(128, 150)
    assert pace.chunk(1024, 90) == 256, "one odd size keeps no larger one away"


@pytest.mark.parametrize(("running", "lengths", "expected"), [
    (0, [900], 512), (1, [900], 320), (1, [300] * 3, 512), (3, [300] * 3, 384), (4, [300] * 3, 320), (1, [9000] * 2, 320)])
def test_a_chunk_beside_running_streams_is_short_and_longer_where_several_wait_for_a_first_token(running, lengths, expected):
    desk = Desk(slots=8, chunk=512, max_context=10_000, num_blocks=2000)
    scheduler = desk.stepper._scheduler
    for seed in range(running):
        desk.ask(prompt_of(3, seed), 50)
    for _ in range(2 * running):
        desk.stepper.step()
    assert len(scheduler.running) == running
    scheduler.pace = PrefillPace()
    scheduler.pace.record(512, 192)
    for seed, length in enumerate(lengths):
        desk.ask(prompt_of(length, 10 + seed), 3)
    list(scheduler.admit())
    assert scheduler._chunk_size() == expected
