"""Answers cut anywhere give one result; only whole calls of offered tools are calls."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.chat.stream import DeltaParser
from q27app.chat.types import Delta, ToolChoice
from tests.chat.messages import make_tool

TOOLS = (
    make_tool("ReadFile", required=("path",), path="string", limit="integer"),
    make_tool("WriteFile", required=("path", "body"), path="string", body="string"),
    make_tool("Shell", required=("cmd",), cmd="string", note="string"),
    make_tool("Now"),
)


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


READ = xml("ReadFile", path="a.c")
SHELL = '<tool_call>\n{"name": "Shell", "arguments": {"cmd": "ls"}}\n</tool_call>'


def summary(deltas: list[Delta]) -> list[tuple]:
    """Neighbouring texts joined; a call as (name, arguments)."""
    found: list[tuple] = []
    for delta in deltas:
        if delta.kind in ("text", "reasoning"):
            if found and found[-1][0] == delta.kind:
                found[-1] = (delta.kind, found[-1][1] + delta.text)
            else:
                found.append((delta.kind, delta.text))
        elif delta.kind == "tool_end":
            found.append((delta.call.name, delta.call.arguments))
    return found


def parse(text: str, pieces=None, **options) -> tuple[list[tuple], DeltaParser]:
    is_cut = options.pop("is_cut", False)
    parser = DeltaParser(options.pop("tools", TOOLS), **options)
    deltas: list[Delta] = []
    for piece in [text] if pieces is None else pieces:
        deltas += parser.feed(piece)
    return summary(deltas + parser.finish(is_cut)), parser


def parsed(text: str, **options) -> list[tuple]:
    """The result, which is the same whole, by character, and in random pieces."""
    whole, _ = parse(text, **options)
    assert parse(text, list(text), **options)[0] == whole
    rng = random.Random(len(text))
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(6))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    assert parse(text, pieces, **options)[0] == whole
    return whole


CASES = {
    "plain": ("Hello, world.\n", [("text", "Hello, world.\n")]),
    "reasoning": ("<think>why</think>\n\na", [("reasoning", "why"), ("text", "\n\na")]),
    "xml": (f"Go.\n{READ}", [("text", "Go.\n"), ("ReadFile", {"path": "a.c"})]),
    "json": (f"Go.\n{SHELL}", [("text", "Go.\n"), ("Shell", {"cmd": "ls"})]),
    "in a row": (
        f"{READ}\n{SHELL}{READ}\n",
        [("ReadFile", {"path": "a.c"}), ("Shell", {"cmd": "ls"}), ("ReadFile", {"path": "a.c"})],
    ),
    "text after": (f"{READ}\n\ndone", [("ReadFile", {"path": "a.c"}), ("text", "\n\ndone")]),
    "no parameters": (xml("Now"), [("Now", {})]),
    "two in one": (
        '<tool_call>{"name":"Now","arguments":{}}\n{"name":"Shell","arguments":{"cmd":"x"}}</tool_call>',
        [("Now", {}), ("Shell", {"cmd": "x"})],
    ),
    "two xml in one": (
        "<tool_call><function=Now></function>\n<function=Now>\n</function></tool_call>",
        [("Now", {}), ("Now", {})],
    ),
    "prose in the wrapper": ('<tool_call>{"name":"Now"} I did it</tool_call>', [("Now", {}), ("text", "I did it")]),
    "arguments as text": (
        '<tool_call>{"name":"Shell","arguments":"{\\"cmd\\":\\"x\\"}"}</tool_call>',
        [("Shell", {"cmd": "x"})],
    ),
    "numbers by schema": (xml("ReadFile", path="12", limit="12"), [("ReadFile", {"path": "12", "limit": 12})]),
    "blanks are content": (
        xml("WriteFile", path=" a ", body="\n  x\r\n\ty  \n"),
        [("WriteFile", {"path": " a ", "body": "\n  x\r\n\ty  \n"})],
    ),
    "empty value": (xml("WriteFile", path="a", body=""), [("WriteFile", {"path": "a", "body": ""})]),
    "value on the line": (
        "<tool_call><function=Shell><parameter=cmd>ls</parameter></function></tool_call>",
        [("Shell", {"cmd": "ls"})],
    ),
    "closer in a value": (
        xml("Shell", cmd="echo '</tool_call>' </function> x"),
        [("Shell", {"cmd": "echo '</tool_call>' </function> x"})],
    ),
    "value_end in a value": (
        xml("Shell", cmd="a </parameter> b", note="n"),
        [("Shell", {"cmd": "a </parameter> b", "note": "n"})],
    ),
    "a call in a value": (
        xml("WriteFile", path="doc", body=f"Say:\n{xml('X', a='1', b='2')}\nthen"),
        [("WriteFile", {"path": "doc", "body": f"Say:\n{xml('X', a='1', b='2')}\nthen"})],
    ),
    "parameters in a value": (
        xml("WriteFile", path="doc", body="<parameter=path>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\nend"),
        [("WriteFile", {"path": "doc", "body": "<parameter=path>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\nend"})],
    ),
    "closer in a JSON string": (
        '<tool_call>{"name":"Shell","arguments":{"cmd":"x </tool_call> \\" y"}}</tool_call>.',
        [("Shell", {"cmd": 'x </tool_call> " y'}), ("text", ".")],
    ),
    "content tags in JSON": (
        '<tool_call>{"name":"Shell","arguments":{"cmd":"x </content> arguments\\": z"}}</tool_call>',
        [("Shell", {"cmd": 'x </content> arguments": z'})],
    ),
    "closer missing before the next": (f"{READ[:-12]}\n{READ}", [("ReadFile", {"path": "a.c"})] * 2),
    "closer missing at the end": (READ[:-12], [("ReadFile", {"path": "a.c"})]),
    "prose with generics": (
        f"Use Vec<u8> for <path>, arr[0\n\n{READ}",
        [("text", "Use Vec<u8> for <path>, arr[0\n\n"), ("ReadFile", {"path": "a.c"})],
    ),
    "open quote before": (f'say "hi\n{SHELL}', [("text", 'say "hi\n'), ("Shell", {"cmd": "ls"})]),
    "open backtick before": (f"a ` b\n{SHELL}", [("text", "a ` b\n"), ("Shell", {"cmd": "ls"})]),
    "code before": (f"I use `ls`.{SHELL}", [("text", "I use `ls`."), ("Shell", {"cmd": "ls"})]),
    "fence before": (f"```\nx\n```\n{SHELL}", [("text", "```\nx\n```\n"), ("Shell", {"cmd": "ls"})]),
    "stray closer": ("a</tool_call>b", [("text", "ab")]),
    "call in reasoning": (f"<think>{READ}</think>x", [("reasoning", READ), ("text", "x")]),
    "reasoning twice": (
        "<think>a</think>b<think>c</think>d",
        [("reasoning", "a"), ("text", "b"), ("reasoning", "c"), ("text", "d")],
    ),
    "opener twice": ("<tool_call>\n<tool_call>", []),
    "opener alone": ("x\n<tool_call>\n", [("text", "x\n")]),
    "opener doubled": (f"<tool_call>\n{READ}", [("ReadFile", {"path": "a.c"})]),
    "opener cut": ("<tool_call", []),
    "reasoning cut": ("<think>half", [("reasoning", "half")]),
    "reasoning's closer cut": ("<think>half</thi", [("reasoning", "half")]),
    "comparison at the end": ("so x<t", [("text", "so x<t")]),
    "surrogates": (
        '<tool_call>{"name":"Shell","arguments":{"cmd":"\\ud83d\\ude00 \\ud800"}}</tool_call>',
        [("Shell", {"cmd": "😀 \ufffd"})],
    ),
    "mentioned in prose": (
        "Write <tool_call> to start.\n\nThen more.",
        [("text", "Write <tool_call> to start.\n\nThen more.")],
    ),
    "mentioned at the end": ("Write <tool_call> to start.", [("text", "Write <tool_call> to start.")]),
}


@pytest.mark.parametrize("name", CASES)
def test_answers_become(name):
    text, wanted = CASES[name]
    assert parsed(text) == wanted


REFUSED = {
    "fence": f"```xml\n{READ}\n```",
    "open fence": f"~~~\n{READ}",
    "inline code": "`<tool_call>` starts `</tool_call>`",
    "quotation": "> " + SHELL.replace("\n", " "),
    "list item": "- " + SHELL.replace("\n", " "),
    "indented": "    " + SHELL.replace("\n", " "),
    "undeclared": xml("Wipe", path="/"),
    "undeclared json": '<tool_call>{"name":"Wipe","arguments":{}}</tool_call>',
    "no object": "<tool_call>ls</tool_call>",
    "arguments missing": '<tool_call>{"name":"ReadFile"}</tool_call>',
    "list": '<tool_call>[{"name":"Now"}]</tool_call>',
    "constant": '<tool_call>{"name":"Shell","arguments":{"cmd":NaN}}</tool_call>',
    "deep": '<tool_call>{"name":"Shell","arguments":{"cmd":' + "[" * 300 + "]" * 300 + "}}</tool_call>",
    "deeper": '<tool_call>{"name":"Shell","arguments":{"cmd":' + "[" * 20_000 + "]" * 20_000 + "}}</tool_call>",
    "half JSON": '<tool_call>{"name":"Shell","arguments":{"cmd":"x"}</tool_call>',
    "text in the function": '<tool_call>\n<function=Shell>\n{"cmd": 1}\n</function>\n</tool_call>',
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_call_stays_visible(name):
    text = REFUSED[name]
    assert parsed(text) == [("text", text)]


def test_a_malformed_call_does_not_take_the_next_one_with_it():
    broken = '<tool_call>{"name":"Shell","arguments":{"cmd":"x</tool_call>'
    assert parsed(f"{broken}\n{SHELL}") == [("text", f"{broken}\n"), ("Shell", {"cmd": "ls"})]
    swallowed = "<tool_call><function=Shell><parameter=cmd>v</tool_call>"
    assert ("ReadFile", {"path": "a.c"}) in parsed(swallowed + READ)
    one_line = READ.replace("\n", "")
    assert not [item for item in parsed(swallowed + one_line) if item[0] == "Shell"]


def test_every_cut_runs_nothing_half_written():
    text = f"<think>why</think>\n\nGo.\n{xml('WriteFile', path='a', body='one </tool_call> two')}\n{SHELL}"
    allowed = [("WriteFile", {"path": "a", "body": "one </tool_call> two"}), ("Shell", {"cmd": "ls"})]
    for cut in range(len(text) + 1):
        found, parser = parse(text[:cut], is_cut=True)
        calls = [item for item in found if item[0] not in ("text", "reasoning")]
        shown = "".join(item[1] for item in found if item[0] == "text")
        assert calls == allowed[: len(calls)], cut
        assert shown.removesuffix("<").strip() in ("", "G", "Go", "Go."), cut
        assert parser.finish_reason("length") in (("length", "tool_calls") if calls else ("length",))


def test_whole_calls_of_a_cut_wrapper_run():
    found, parser = parse('<tool_call>{"name":"Now"}\n{"name":"Shell","arg')
    assert found == [("Now", {})]
    assert (parser.finish_reason("length"), parser.finish_reason("stop")) == ("length", "tool_calls")


def test_without_tools_markers_are_text():
    assert parsed(f"x {READ}", tools=()) == [("text", f"x {READ}")]
    assert parsed(READ, tool_choice=ToolChoice("none")) == [("text", READ)]


def test_only_chosen_tools_run():
    assert parsed(READ + SHELL, tool_choice=ToolChoice("required", ("Shell",))) == [
        ("text", READ),
        ("Shell", {"cmd": "ls"}),
    ]


def test_only_one_call_where_one_is_allowed():
    assert parsed(READ + SHELL, tool_choice=ToolChoice(parallel=False)) == [
        ("ReadFile", {"path": "a.c"}),
        ("text", SHELL),
    ]


def test_the_answer_starts_in_its_channel():
    assert parsed("why</think>a", channel="reasoning") == [("reasoning", "why"), ("text", "a")]
    assert parsed(READ[len("<tool_call>\n") :], channel="tool") == [("ReadFile", {"path": "a.c"})]
    assert parsed("no call</tool_call>", channel="tool") == [("text", "no call</tool_call>")]


def test_raw_answers_are_only_cut_at_stops():
    text = " \n<think>a</think><tool_call>"
    assert parsed(text, dialect="raw") == [("text", text)]
    assert parsed(text + "END more", dialect="raw", stop=("END",)) == [("text", text)]


def test_a_call_is_told_in_three_deltas():
    ids = iter(["one", "two"])
    parser = DeltaParser(TOOLS, make_id=lambda: next(ids))
    deltas = parser.feed(SHELL) + parser.feed(READ) + parser.finish()
    assert [(delta.kind, delta.call.id) for delta in deltas] == [
        ("tool_start", "one"),
        ("tool_args", "one"),
        ("tool_end", "one"),
        ("tool_start", "two"),
        ("tool_args", "two"),
        ("tool_end", "two"),
    ]
    assert deltas[1].text == '{"cmd": "ls"}' and deltas[2].call.arguments == {"cmd": "ls"}
    assert parser.num_calls == 2 and parser.finish_reason("stop") == "tool_calls"


def test_text_is_not_held_longer_than_it_must():
    parser = DeltaParser(TOOLS)
    shown = [
        "".join(delta.text for delta in parser.feed(piece))
        for piece in ["a <", "b", "<tool", "box", " {", '"name"', ': "Al', "\n"]
    ]
    assert shown == ["a ", "<b", "", "<toolbox", " ", "", '{"name": "Al', "\n"]


@pytest.mark.parametrize(
    ("text", "stop", "wanted", "found"),
    [
        ("one END two", ("END",), "one ", "END"),
        ("one EN", ("END",), "one EN", None),
        ("aab", ("ab",), "a", "ab"),
        ("abcd", ("bcd", "c"), "ab", "c"),
        ("xaaab", ("aab",), "xa", "aab"),
        ("one", ("",), "one", None),
        ("<think>END</think>x END", ("END",), "x ", "END"),
        ("\n\nfirst\n\nsecond", ("\n\n",), "\n\nfirst", "\n\n"),
        (f"a\n{xml('Shell', cmd='END')}b END", ("END",), "a\nb ", "END"),
    ],
)
def test_stop_strings_end_the_text(text, stop, wanted, found):
    result = parsed(text, stop=stop)
    assert "".join(item[1] for item in result if item[0] == "text") == wanted
    assert parse(text, stop=stop)[1].stop_sequence == found


PIECES = st.sampled_from(
    [
        "a",
        " ",
        "\n",
        "\n\n",
        "`",
        "```\n",
        '"',
        "\\",
        "{",
        "}",
        "<",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=Shell>",
        "<function=Now>",
        "</function>",
        "<parameter=cmd>",
        "</parameter>",
        "- ",
        "    ",
        "é",
        READ,
        SHELL,
        '{"name":"Now"}',
        "<tool",
        "END",
        "EN",
        "<parameter=",
        "<function=",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=24), st.sampled_from(["text", "reasoning", "tool"]), st.randoms())
def test_no_split_changes_the_result(words, channel, rng):
    text = "".join(words)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    options = {"channel": channel, "stop": ("END",)}
    whole, by_pieces, by_chars = (parse(text, cut, **options) for cut in ([text], pieces, list(text)))
    assert whole[0] == by_pieces[0] == by_chars[0]
    assert whole[1].missed == by_pieces[1].missed == by_chars[1].missed
    assert whole[1].is_unfinished == by_pieces[1].is_unfinished == by_chars[1].is_unfinished


@pytest.mark.parametrize(
    "text",
    [
        "`" * 50_000,
        '"' * 50_000,
        "<" * 50_000,
        "<tool_call>" * 5_000,
        "`<tool_call>` " * 4_000,
        "</tool_call>" * 5_000,
        "<tool_call>{" + '"a </tool_call> b", ' * 3_000,
        "<tool_call><function=Shell><parameter=cmd>" + "</tool_call>" * 4_000,
        "<tool_call>" + "[" * 50_000,
        "<tool_call>" + " " * 50_000,
        "<tool_call>{" + "{" * 50_000 + "</tool_call>",
        "<tool_call>[" + "<tool_cal" * 5_000,
        "<think>" + "</thin" * 8_000,
        "<tool_call><function=Shell>" + "<parameter=x" * 4_000,
        "<tool_call>" + '{"name":"Now"} ' * 3_000 + "</tool_call>",
        "\n" * 50_000,
        "<tool_call><" + "\n" * 50_000,
        READ * 1_000,
        '<tool_call>{"name":"Shell","arguments":{"cmd":"' + "x" * 50_000 + '"}}</tool_call>',
    ],
)
def test_time_is_linear(text):
    for pieces in ([text], [text[start : start + 4] for start in range(0, len(text), 4)]):
        start = time.process_time()
        parse(text, pieces)
        assert time.process_time() - start < 2


@pytest.mark.long
def test_random_characters_never_raise(long_scale):
    rng = random.Random(1)
    alphabet = '<>/=`"{}[]\\ \n' + "tool_callthinkfunctionparameter"
    for _ in range(int(100_000 * long_scale)):
        text = "".join(rng.choice(alphabet) for _ in range(80))
        mixed = list(READ + SHELL)
        for _ in range(rng.randrange(4)):
            mixed[rng.randrange(len(mixed))] = rng.choice(alphabet)
        parse(text)
        parse("".join(mixed))
