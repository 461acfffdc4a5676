"""Constraints: what a schema and a tool call allow, token by token, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from q27app.chat.guide import make_guide
from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import Tool
from q27app.errors import BadRequest, Q27Error
from q27app.weights.demo_tokenizer import train

pytest.importorskip("llguidance", reason="llguidance is in the extra json")
grammar = pytest.importorskip("q27app.chat.grammar")

SCHEMA = {
    "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
    "additionalProperties": False,
}
LOOK = Tool("look", "", {
    "type": "object", "required": ["path"], "$defs": {"size": {"type": "number"}},
    "properties": {
        "path": {"type": "string"}, "deep": {"type": "boolean"}, "kind": {"enum": ["file", "dir"]},
        "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}},
    },
}, {})
FREE = Tool('fr"ee é', "", {}, {})
XML_LOOK = "<function=look>\n<parameter=path>\na < b </function> </tool_call>\n\n</parameter>\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata({"tokenizer.huggingface.json": train([], 265)})


@pytest.fixture(scope="module")
def constraints(tokenizer):
    return grammar.Constraints(tokenizer, 300)


def is_allowed(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> np.uint32(token % 32) & 1)


def verdict(tokenizer, constraint, text: str) -> str:
    """"done", "may end", "goes on", or the text that was not allowed any more."""
    tokens = tokenizer.encode(text, control=True)
    for index, token in enumerate(tokens):
        if not is_allowed(constraint.mask(()), token):
            return tokenizer.decode(tokens[index:])
        constraint.advance((token,))
    if constraint.is_done:
        return "done"
    return "may end" if all(is_allowed(constraint.mask(()), eos) for eos in tokenizer.eos_ids) else "goes on"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"answer": 17}', "done"),
        ('\n\n{"answer":17}', "done"),
        ('{"answer": 17', "goes on"),
        ('{"answer": "x"}', '"x"}'),
        ('{"other": 1}', 'other": 1}'),
        ("I think", "I think"),
        ('{\n  "answer":\n\t' + " " * 18 + "17\n}", "done"),
        ('{"answer":' + " " * 21 + "17}", " 17}"),
        ("", "goes on"),
    ],
)
def test_an_answer_keeps_to_its_schema(tokenizer, constraints, text, expected):
    assert verdict(tokenizer, constraints.compile(grammar.answer_source(SCHEMA), "x"), text) == expected


def test_any_object_may_hold_anything(tokenizer, constraints):
    constraint = constraints.compile(grammar.answer_source({"type": "object"}), "x")
    assert verdict(tokenizer, constraint, '{"a": [1, null, {"b": "</think> é \\" <tool_call>"}]}') == "done"


@pytest.mark.parametrize(
    ("tools", "dialect", "text", "expected"),
    [
        ([LOOK], "json", '{"name": "look", "arguments": {"path": "p", "deep": true}}\n</tool_call>', "may end"),
        ([LOOK], "json", '{"name": "look", "arguments": {}}\n</tool_call>', "}}\n</tool_call>"),
        ([LOOK], "json", '{"name": "lick"', 'ick"'),
        ([LOOK, FREE], "json", '{"name": "fr\\"ee é", "arguments": {"any": [1]}}\n</tool_call>', "may end"),
        ([LOOK], "xml", XML_LOOK + "</function>\n</tool_call>", "may end"),
        ([LOOK], "xml", XML_LOOK + "<parameter=kind>\ndir\n</parameter>\n<parameter=sizes>\n[1, 2.5]\n</parameter>\n"
         "</function>\n</tool_call>", "may end"),
        ([LOOK], "xml", XML_LOOK + "<parameter=kind>\nlink", "link"),
        ([LOOK], "xml", "<function=look>\n</function>", "/function>"),
        ([LOOK], "xml", XML_LOOK + "<parameter=new>", "new>"),
        ([FREE], "xml", '<function=fr"ee é>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n'
         "</function>\n</tool_call>\n<tool_call>\n<function=", "goes on"),
    ],
)
def test_a_call_keeps_to_its_form(tokenizer, constraints, tools, dialect, text, expected):
    constraint = constraints.compile(grammar.calls_source(tools, dialect), "tools")
    assert verdict(tokenizer, constraint, text) == expected


@pytest.mark.parametrize("dialect, text", [
    ("json", '{"name": "look", "arguments": {"deep":true,"path":"p"}}\n</tool_call>'),
    ("xml", "<function=look>\n<parameter=deep>\ntrue\n</parameter>\n<parameter=path>\np\n</parameter>\n</function>\n</tool_call>"),
])
def test_arguments_come_in_the_order_that_the_template_prints(tokenizer, constraints, dialect, text):
    """Not in the schema's, in which path stands first, where the template sorts."""
    sorted_, own = (constraints.compile(grammar.calls_source(grammar.as_printed([LOOK], sorts), dialect), "tools") for sorts in (True, False))
    assert verdict(tokenizer, sorted_, text) == "may end"
    assert verdict(tokenizer, own, text) != "may end"


def test_one_call_alone_is_the_end_where_only_one_is_allowed(tokenizer, constraints):
    constraint = constraints.compile(grammar.calls_source([FREE], "json", parallel=False), "tools")
    assert verdict(tokenizer, constraint, '{"name": "fr\\"ee é", "arguments": {}}\n</tool_call>') == "done"


def test_with_tools_an_answer_is_a_value_or_calls(tokenizer, constraints):
    for text in ('{"answer": 1}', '<tool_call>\n{"name": "fr\\"ee é", "arguments": {}}\n</tool_call>'):
        constraint = constraints.compile(grammar.answer_source(SCHEMA, [FREE], "json"), "x")
        assert verdict(tokenizer, constraint, text) in ("done", "may end")


def test_a_look_ahead_changes_nothing(tokenizer, constraints):
    constraint = constraints.compile(grammar.answer_source(SCHEMA), "x")
    before = constraint.mask(()).copy()
    ahead = constraint.mask(tokenizer.encode('{"answer":'))
    assert ahead.shape == (10,) and ahead.dtype == np.uint32
    assert is_allowed(ahead, ord("7")) and not is_allowed(ahead, ord("x"))
    assert (constraint.mask(()) == before).all()
    with pytest.raises(Q27Error, match="left the form"):
        constraint.advance(tokenizer.encode("x"))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "pattern": "(?<=x)y"},
        {"$ref": "#/$defs/absent"},
        {"$ref": "http://127.0.0.1:9/x"},
        {"type": "nonsense"},
        {"if": {}, "then": {}},
    ],
)
def test_what_cannot_be_enforced_is_refused(constraints, schema):
    with pytest.raises(BadRequest, match="response_format: the schema cannot be enforced: ") as caught:
        constraints.compile(grammar.answer_source({"type": "object", "properties": {"a": schema}}), "response_format")
    assert caught.value.param == "response_format" and "start:" not in str(caught.value)


@pytest.mark.parametrize("vocab_size", [265, 287, 288, 289, 320])
def test_a_mask_has_a_bit_for_each_column_of_the_logits(tokenizer, vocab_size):
    constraint = grammar.Constraints(tokenizer, vocab_size).compile(grammar.answer_source(SCHEMA), "x")
    mask = constraint.mask(())
    assert mask.shape == (-(-vocab_size // 32),)
    assert not any(is_allowed(mask, token) for token in range(265, min(vocab_size, 32 * len(mask))))


def test_too_many_schemas_are_refused(constraints):
    big = Tool("big", "", {"properties": {f"k{index}": {"type": "integer"} for index in range(20_000)}}, {})
    with pytest.raises(BadRequest, match="characters"):
        constraints.compile(grammar.calls_source([big], "json"), "tools")


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_a_guide_constrains_from_the_first_token_after_reasoning(tokenizer, constraints, step):
    """In steps of any width: what a step drew past the closer, without a mask, is drawn again."""
    guide = make_guide(tokenizer, channel="reasoning",
                       grammar=constraints.compile(grammar.answer_source(SCHEMA), "x"))
    wanted = tokenizer.encode("a{</think>Hello")
    said: list[int] = []
    for _ in range(100):
        run: list[int] = []
        for _ in range(step):
            mask = guide.mask(run)
            free = wanted[len(said) + len(run)] if len(said) + len(run) < len(wanted) else ord("z")
            run.append(free if mask is None or is_allowed(mask, free) else likely(tokenizer, mask))
        decision = guide.advance(run)
        said += [*run[: decision.keep], *decision.force]
        if decision.finish:
            break
    reasoning, _, answer = tokenizer.decode(said).partition("</think>")
    assert (reasoning, decision.finish) == ("a{", "stop")
    assert json.loads(answer) == {"answer": 1}


def likely(tokenizer, mask) -> int:
    ranked = [*tokenizer.eos_ids, *b'}"1:{answer']
    return next(token for token in ranked if is_allowed(mask, token))


@pytest.mark.parametrize(
    "pieces", [["</think>{"], ["</thi", "nk>\n\n", "{"], ["</", "think", ">\n\n{"], ["x</think>", "\n\n", "{"], [">", "</think>{"]]
)
def test_a_closer_in_any_tokens_starts_the_constraint(tokenizer, constraints, pieces):
    class Words:
        """A tokenizer whose ids are the pieces."""

        eos_ids, vocab_size = (999,), 1000

        def encode(self, text, control=False):
            return [tokenizer.vocab_size] if text == "</think>\n\n" else tokenizer.encode(text, control)

        def token_bytes(self, token):
            return pieces[token - 500].encode() if token >= 500 else b""

    constraint = constraints.compile(grammar.answer_source(SCHEMA), "x")
    seen: list[int] = []

    class Spy:
        is_done = False
        mask = staticmethod(constraint.mask)

        @staticmethod
        def advance(tokens):
            seen.extend(token for token in tokens if token < 500)

    guide = make_guide(Words(), channel="reasoning", grammar=Spy())
    for index in range(len(pieces)):
        guide.advance([500 + index])
    assert guide.channel == "text"
    assert tokenizer.decode(seen).strip() == ("{" if pieces[-1] != "{" else "")
