"""What a guide decides between two steps, and that it does not depend on how many tokens a step brings."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from q27app.chat.guide import MAX_REDONE, Guide, make_guide, reasoning_limit
from q27app.chat.stream import DeltaParser
from q27app.chat.tokenizer import Detokenizer
from tests.chat.messages import make_tool

TOOL = make_tool("Shell", cmd="string")


def run(guide: Guide, tokens: list[int], step: int, max_tokens: int = 100_000) -> tuple[list[int], str | None]:
    """What an engine keeps that draws `tokens` in steps of `step`; what a guide drops is drawn again, except an end."""
    kept: list[int] = []
    position = 0
    while position < len(tokens) and len(kept) < max_tokens:
        drawn = tokens[position : position + step]
        decision = guide.advance(drawn)
        kept += drawn[: decision.keep]
        kept += decision.force
        position += decision.keep
        if decision.force and position < len(tokens) and tokens[position] in guide._eos_ids:
            position += 1
        if decision.finish:
            return kept, decision.finish
    return kept, None


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, control=True)


def shown(tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
class TestDecisions:
    def test_end_of_text_ends_the_answer(self, tokenizer, step):
        guide = make_guide(tokenizer)
        assert run(guide, encode(tokenizer, "the<|im_end|>more"), step) == (encode(tokenizer, "the"), "stop")

    def test_past_end_of_text_when_told_so(self, tokenizer, step):
        tokens = encode(tokenizer, "the<|im_end|>more")
        assert run(make_guide(tokenizer, eos_ids=()), tokens, step) == (tokens, None)

    def test_the_budget_closes_the_reasoning(self, tokenizer, step):
        guide = make_guide(tokenizer, channel="reasoning", budget=5)
        kept, finish = run(guide, encode(tokenizer, "abcdefgh the answer<|im_end|>"), step)
        assert shown(tokenizer, kept) == "abcde</think>\n\nfgh the answer"
        assert (finish, guide.num_reasoning, guide.is_budget_exceeded, guide.channel) == ("stop", 5, True, "text")

    def test_a_budget_of_nothing_closes_at_once(self, tokenizer, step):
        guide = make_guide(tokenizer, channel="reasoning", budget=0)
        kept, _ = run(guide, encode(tokenizer, "ab"), step)
        assert shown(tokenizer, kept) == "</think>\n\nab" and guide.num_reasoning == 0

    def test_closing_in_time_uses_no_force(self, tokenizer, step):
        guide = make_guide(tokenizer, channel="reasoning", budget=5)
        tokens = encode(tokenizer, "abcd</think>more than five tokens")
        assert run(guide, tokens, step) == (tokens, None)
        assert (guide.num_reasoning, guide.is_budget_exceeded) == (5, False)

    def test_a_closer_of_ordinary_tokens_is_seen(self, tokenizer, step):
        guide = make_guide(tokenizer, channel="reasoning", budget=14)
        tokens = tokenizer.encode("abcd</think>more than five tokens")
        assert len(tokens) > 20 and run(guide, tokens, step) == (tokens, None)

    def test_end_of_text_while_reasoning_goes_on_into_the_answer_once(self, tokenizer, step):
        guide = make_guide(tokenizer, channel="reasoning")
        kept, finish = run(guide, encode(tokenizer, "abc<|im_end|>the<think>x<|im_end|>y"), step)
        assert shown(tokenizer, kept) == "abc</think>\n\nthe<think>x"
        assert (finish, guide.is_continued) == ("stop", True)

    def test_a_stop_string_keeps_the_token_that_completes_it(self, tokenizer, step):
        guide = make_guide(tokenizer, stop=("op",))
        kept, finish = run(guide, encode(tokenizer, "a stop sign"), step)
        assert (shown(tokenizer, kept), finish, guide.stop_sequence) == ("a stop", "stop", "op")

    def test_the_text_layer_cuts_inside_the_token(self, qwen, step):
        guide = make_guide(qwen, stop=("plan",))
        kept, _ = run(guide, encode(qwen, "One explanation more"), step)
        parser, detokenizer = DeltaParser(stop=("plan",)), Detokenizer(qwen)
        text = "".join(delta.text for token in kept for delta in parser.feed(detokenizer.push([token])))
        assert (text, parser.stop_sequence) == ("One ex", "plan")

    def test_stop_strings_are_not_looked_for_in_reasoning_and_calls(self, tokenizer, step):
        text = 'END</think>x<tool_call>\n{"name":"Shell","arguments":{"cmd":"END"}}\n</tool_call>'
        guide = make_guide(tokenizer, stop=("END",), channel="reasoning", tools=(TOOL,))
        tokens = encode(tokenizer, text)
        assert run(guide, tokens, step) == (tokens, None)

    def test_a_loop_ends_with_length(self, tokenizer, step):
        guide = make_guide(tokenizer, channel="reasoning")
        head = encode(tokenizer, "because ")
        kept, finish = run(guide, head + encode(tokenizer, "abcdefghijkl") * 50, step)
        assert (finish, guide.is_loop) == ("length", True)
        assert 512 <= len(kept) <= len(head) + 600

    def test_what_only_looks_like_a_loop_goes_on(self, tokenizer, step):
        rows = encode(tokenizer, "".join(f"| {index * 7919 % 1000} | 0 | 0 | 0 |\n" for index in range(300)))
        guide = make_guide(tokenizer, tools=(TOOL,), channel="tool")
        zeros = encode(tokenizer, "0," * 1000)
        assert run(make_guide(tokenizer), rows, step) == (rows, None)
        assert run(guide, zeros, step) == (zeros, None)


def test_steps_of_any_size_give_one_text(tokenizer):
    rng = random.Random(5)
    words = [
        "the ",
        "in",
        "<think>",
        "</think>",
        "END",
        "EN",
        "<|im_end|>",
        "\n\n",
        "x" * 9,
        "<tool_call>",
        "</tool_call>",
    ]
    for seed in range(60):
        tokens = encode(tokenizer, "".join(rng.choice(words) for _ in range(12)))
        results = []
        for step in (1, 3, 50):
            guide = make_guide(
                tokenizer, stop=("END",), channel=("reasoning", "text")[seed % 2], budget=12, tools=(TOOL,)
            )
            results.append((*run(guide, tokens, step), guide.num_reasoning, guide.stop_sequence, guide.channel))
        assert results[0] == results[1] == results[2], f"seed {seed}"


@pytest.mark.parametrize(
    ("budget", "max_tokens", "reserve", "limit"),
    [
        (None, None, 0, None),
        (-1, 100, 0, None),
        (7, 100, 0, 7),
        (None, 100, 40, 57),
        (90, 100, 40, 57),
        (7, 100, 40, 7),
        (-1, 20, 40, 0),
    ],
)
def test_the_answer_keeps_its_reserve(budget, max_tokens, reserve, limit):
    assert reasoning_limit(budget, max_tokens, reserve, 3) == limit


def test_a_cut_character_does_not_spoil_the_close(tokenizer):
    guide = make_guide(tokenizer, channel="reasoning", budget=2)
    decision = guide.advance(tokenizer.encode("😀")[:2])
    assert tokenizer.decode(decision.force) == "</think>\n\n" and guide.channel == "text"


class Recorder:
    """A grammar that allows one id and writes down what it is shown."""

    is_done = False

    def __init__(self) -> None:
        self.seen: list[int] = []

    def advance(self, tokens) -> None:
        self.seen += tokens

    def mask(self, prefix):
        return np.array([1 << len(prefix)], dtype=np.uint32)


def test_a_grammar_acts_only_after_reasoning(tokenizer):
    grammar = Recorder()
    guide = make_guide(tokenizer, channel="reasoning", grammar=grammar)
    assert guide.mask(()) is None
    guide.advance(encode(tokenizer, "ab</think>"))
    assert guide.mask((7, 7))[0] == 4 and grammar.seen == []
    guide.advance([5])
    assert grammar.seen == [5]
    assert make_guide(tokenizer).mask(()) is None


def test_a_token_costs_little(tokenizer):
    rng = random.Random(3)
    tokens = encode(tokenizer, "".join(rng.choice("abc \n<`") for _ in range(20_000)))
    guide = make_guide(tokenizer, stop=("never seen",), channel="reasoning", budget=10_000, tools=(TOOL,))
    start = time.process_time()
    for token in tokens:
        guide.advance((token,))
    assert time.process_time() - start < 100e-6 * len(tokens)
    assert len(guide._recent) <= 9_000


@pytest.mark.parametrize("channel", ["text", "reasoning"])
def test_the_channel_is_known_at_every_token_though_the_parser_is_shown_texts_late(qwen, channel):
    from tests.chat.drifts import TOOLS
    from tests.chat.test_parser_corpus import CORPUS

    for text in [*CORPUS[::3], '{"name": "x <think> y", 1 then <think>more</think> done ' * 3]:
        guide = make_guide(qwen, channel=channel, tools=TOOLS)
        parser, detokenizer, num_reasoning = DeltaParser(TOOLS, None, channel), Detokenizer(qwen), 0
        for token in qwen.encode(text, control=True):
            if token in qwen.eos_ids:
                break
            num_reasoning += parser.channel == "reasoning"
            guide.advance((token,))
            parser.feed(detokenizer.push((token,)))
            assert (guide.channel, guide.num_reasoning) == (parser.channel, num_reasoning), text


@pytest.mark.parametrize("channel", ["text", "reasoning"])
@pytest.mark.parametrize("budget", [None, 3, 40])
def test_a_guide_tells_when_the_budget_will_close_the_reasoning(tokenizer, channel, budget):
    tags = [encode(tokenizer, text) for text in ("</think>", "a", "\n\n", "> <", "the ")]
    certain = 0
    for seed in range(60):
        rng = random.Random(seed)
        guide = make_guide(tokenizer, ("stop",), channel, budget)
        for token in (token for _ in range(60) for token in rng.choice(tags)):
            may_divert = guide.may_divert
            decision = guide.advance([token])
            assert may_divert or decision.finish or (decision.keep == 1 and not decision.force)
            certain += not may_divert
            if decision.finish:
                break
    assert certain


def test_an_end_while_reasoning_is_feared_only_where_it_would_cost_much(tokenizer):
    guide = make_guide(tokenizer, channel="reasoning", finds_loops=False)
    letters = encode(tokenizer, "abcdefgh")
    for _ in range(MAX_REDONE // len(letters)):
        guide.advance(letters)
        assert not guide.may_divert
    guide.advance(letters)
    assert guide.may_divert
    guide.advance(encode(tokenizer, "<|im_end|>"))
    assert guide.is_continued and not guide.may_divert
