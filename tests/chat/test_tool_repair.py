"""Each known deviation is read in every way it can arrive; what is none stays text."""

from __future__ import annotations

import time

import pytest

from q27app.chat.stream import DeltaParser
from q27app.chat.tool_repair import DRIFTS, infer_tool
from q27app.chat.types import ToolChoice
from tests.chat.drifts import AT_END, CALL, CMD, DRIFTED, HALF, LS, READ, REFUSED, SHOWN, TOOLS, WRAPPED, XML
from tests.chat.messages import make_tool
from tests.chat.test_stream import parse


def both(text: str, **options) -> tuple[list[tuple], DeltaParser]:
    """The result, which is the same whole and by character."""
    options.setdefault("tools", TOOLS)
    whole, parser = parse(text, **options)
    again, streamed = parse(text, list(text), **options)
    assert again == whole and streamed.rescues == parser.rescues and streamed.missed == parser.missed
    return whole, parser


def calls(found: list[tuple]) -> list[tuple]:
    return [item for item in found if item[0] not in ("text", "reasoning")]


@pytest.mark.parametrize("name", DRIFTED)
def test_a_bare_call_with_a_known_deviation_is_read(name):
    text, wanted, drift, _ = DRIFTED[name]
    found, parser = both(f"Go.\n\n{text}")
    assert found == [("text", "Go.\n\n"), *wanted]
    assert parser.rescues[drift] == len(wanted) or name in ("X",)
    assert not parser.missed


@pytest.mark.parametrize("name", DRIFTED)
def test_a_wrapped_call_with_a_known_deviation_is_read_unless_it_is_incomplete(name):
    text, wanted, drift, reach = DRIFTED[name]
    found, parser = both(f"<tool_call>\n{text}\n</tool_call>")
    assert calls(found) == ([] if reach == AT_END else wanted)
    if reach == AT_END:
        assert found == [("text", f"<tool_call>\n{text}\n</tool_call>")] and parser.missed


@pytest.mark.parametrize("name", [name for name, row in DRIFTED.items() if row[3] == AT_END])
def test_nothing_is_completed_after_a_limit(name):
    found, parser = both(f"Go.\n\n{DRIFTED[name][0]}", is_cut=True)
    assert found == [("text", "Go.\n\n")] and parser.is_unfinished and len(parser.missed) == 1


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", HALF)
def test_half_a_call_never_runs(name, is_cut):
    forms = [HALF[name], f"<tool_call>\n{HALF[name]}"]
    if name != "14":  # there a closer of what holds it ends a value
        forms.append(f"<tool_call>\n{HALF[name]}\n</tool_call>")
    for form in forms:
        found, parser = both(f"Go.\n\n{form}", is_cut=is_cut)
        assert not calls(found) and not parser.num_calls and (parser.missed or name in ("6", "10")), form


@pytest.mark.parametrize("name", [name for name in HALF if name not in ("6", "10", "11")])
def test_half_a_call_at_the_end_is_recorded_and_not_shown(name):
    found, parser = both(f"Go.\n\n{HALF[name]}")
    assert found == [("text", "Go.\n\n")] and parser.is_unfinished and len(parser.missed) == 1


def test_every_drift_of_the_table_is_shown_by_an_example():
    for drift in DRIFTS.values():
        tools = [tool for tool in TOOLS if tool.name in ("Shell", "ReadFile")]
        found, parser = both(drift.example, tools=tools)
        assert calls(found) and calls(found)[0][0] == "Shell" and parser.rescues[drift.name] == 1, drift.name


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_is_no_call(name):
    found, parser = both(SHOWN[name])
    assert found == [("text", SHOWN[name])] and not parser.rescues


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_call_stays_text(name):
    assert both(REFUSED[name])[0] == [("text", REFUSED[name])]


@pytest.mark.parametrize(
    "prose",
    ["Use Vec<u8> here.", "Replace <path> with yours.", "link [a](b then", "arr[0", 'echo "---', "a ` tick", "<b>bold", "{\"a\": [1,"],
)
def test_open_prose_disarms_no_call_after_it(prose):
    for call in (WRAPPED, CALL, XML):
        assert calls(both(f"{prose}\n\n{call}")[0]) == [LS]
    assert calls(both(f"{prose}\n{WRAPPED}")[0]) == [LS]


def test_a_call_in_an_open_value_does_not_run():
    text = f"<function=WriteFile>\n<parameter=path>\na\n</parameter>\n<parameter=body>\nSay:\n{XML}\n"
    for is_cut in (False, True):
        assert LS not in both(text, is_cut=is_cut)[0]


def test_valid_json_is_never_rewritten():
    for cmd in ("echo the arguments", "x </content> z", 'say "hi", then', "a </tool_call> b"):
        text = '{"name":"Shell","arguments":{"cmd":%s}}' % __import__("json").dumps(cmd)
        for form in (text, f"<tool_call>{text}</tool_call>"):
            assert both(form)[0] == [("Shell", {"cmd": cmd})]


def test_a_value_keeps_its_bytes():
    body = "  \n a & b < c \r\n\t</function> '{\"name\": \"x\"}' \\ é\x02\n" + "x" * 200_000 + "\n\n"
    text = f"<function=WriteFile>\n<parameter=path>\n p \n</parameter>\n<parameter=body>\n{body}\n</parameter>\n</function>"
    wanted = [("WriteFile", {"path": " p ", "body": body})]
    assert parse(text, tools=TOOLS)[0] == wanted
    assert parse(text, [text[at : at + 5] for at in range(0, len(text), 5)], tools=TOOLS)[0] == wanted


def test_bare_calls_count_for_the_cap_and_the_choice():
    assert both(f"{CALL}\n{WRAPPED}", tool_choice=ToolChoice(parallel=False))[0] == [LS, ("text", WRAPPED)]
    assert both(CALL, tool_choice=ToolChoice("none"))[0] == [("text", CALL)]
    assert both(CALL, tool_choice=ToolChoice("required", ("ReadFile",)))[0] == [("text", CALL)]
    assert both(f"{CALL}\n{XML}\n{CALL}")[0] == [LS, LS, LS]


def test_a_bare_call_cut_anywhere_runs_never_half():
    for text in (CALL, XML, DRIFTED["14"][0], DRIFTED["20"][0], DRIFTED["6"][0]):
        for cut in range(len(text)):
            for is_cut in (True, False):
                found, _ = both(f"Go.\n\n{text[:cut]}", is_cut=is_cut)
                assert all(call in (LS, READ) for call in calls(found)), (text[:cut], is_cut)
                if text in (CALL, XML) and is_cut:
                    assert not calls(found)


def test_prose_objects_are_shown_without_delay():
    parser = DeltaParser(TOOLS)
    shown = ["".join(delta.text for delta in parser.feed(piece)) for piece in ['{"na', 'me": "B', 'ob"}', ' {"id": 1}']]
    assert shown == ["", '{"name": "B', 'ob"}', ' {"id": 1}']


def test_a_tool_is_told_by_its_keys_or_refused():
    tools = {tool.name: tool for tool in TOOLS}
    pair = {name: make_tool(name, required=need, a="string", b="string") for name, need in (("One", ("a",)), ("Two", ("a", "b", "c")))}
    assert infer_tool(["path", "body"], tools).name == "WriteFile"
    assert infer_tool(["path", "limit"], tools).name == "ReadFile"
    assert infer_tool(["a", "b"], pair).name == "One"
    assert infer_tool([], tools) is None and infer_tool(["x"], tools) is None
    assert infer_tool(["b"], {name: make_tool(name, b="string") for name in "xy"}) is None


@pytest.mark.parametrize(
    "text",
    ['{"name":' * 4_000, "<tool>" * 4_000, "<name>Shell\n" * 2_000, "<parameter=cmd>\n" * 2_000, 'Shell", ' * 3_000, "{" * 30_000,
     "[" * 15_000 + "}" * 15_000, '{"name": "Shell", "arguments": {"cmd": "' + '", "' * 6_000, "<function=Shell>\n" * 2_000,
     '{"name": "Shell", "arguments": {"cmd": <content>' + "</content> " * 3_000, "<a " * 10_000, "\\" * 30_000, "`" * 50_000],
)
def test_hostile_text_takes_linear_time(text):
    for pieces in ([text], [text[at : at + 7] for at in range(0, len(text), 7)]):
        start = time.process_time()
        parse(text, pieces, tools=TOOLS)
        assert time.process_time() - start < 4
