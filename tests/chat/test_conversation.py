"""What clients send before any template sees it."""

from __future__ import annotations

import pytest

from q27app.chat.conversation import normalize_billing_header, offered_tools
from q27app.chat.types import ToolChoice
from tests.chat.messages import make_tool

HEAD = "x-anthropic-billing-header: "


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            HEAD + "cc_version=9.9.9.aaa; cc_entrypoint=cli; cch=11111;\nrest",
            HEAD + "cc_version=9.9.9.fff; cc_entrypoint=cli; cch=fffff;\nrest",
        ),
        (HEAD + "cc_version=2.1.220.473; cc_entrypoint=cli;", HEAD + "cc_version=2.1.220.fff; cc_entrypoint=cli;"),
        (HEAD + "cc_version=2.1.220; cch=a;", HEAD + "cc_version=2.1.220; cch=f;"),
        (HEAD + "cch=" + "1" * 17 + ";", HEAD + "cch=" + "1" * 17 + ";"),
        (HEAD + "x" * 200 + "cch=1;", HEAD + "x" * 200 + "cch=1;"),
        ("say " + HEAD + "cch=11111;", "say " + HEAD + "cch=11111;"),
        (HEAD + "cc_version=1.2.3.4.5.6;", HEAD + "cc_version=1.2.3.fffff;"),
    ],
)
def test_billing_stamps_become_constant(text, wanted):
    assert normalize_billing_header(text) == wanted


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (ToolChoice(), ["a", "b"]),
        (ToolChoice("none"), []),
        (ToolChoice("required"), ["a", "b"]),
        (ToolChoice("required", ("b",)), ["b"]),
        (ToolChoice("auto", ("a", "c")), ["a"]),
    ],
)
def test_the_choice_says_which_tools_are_offered(choice, names):
    assert [tool.name for tool in offered_tools([make_tool("a"), make_tool("b")], choice)] == names
