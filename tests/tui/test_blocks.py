"""Cutting a growing Markdown text: nothing is lost, nothing is cut again, nothing grows without bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q27app.tui.blocks import MAX_BLOCK, Splitter, code_blocks

PIECES = st.sampled_from(["word ", "\n", "\n\n", "# head\n", "- item\n", "  more\n", "```py\n", "```\n", "~~~\n", "| a | b |\n",
                          "|---|---|\n", "1. one\n", "    code\n", "é\U0001f600", "````\n", " ", "\t", "\r"])


def cut(texts) -> list:
    splitter = Splitter()
    return [block for text in texts for block in splitter.feed(text)] + splitter.finish()


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=60), st.integers(0, 2**32))
def test_blocks_joined_are_the_text_whatever_the_split(pieces, seed):
    import random

    text = "".join(pieces)
    places = sorted(random.Random(seed).choices(range(len(text) + 1), k=5))
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]
    assert "".join(block.source for block in cut(parts)) == text
    assert cut(parts) == cut([text]) == cut(list(text))


@pytest.mark.parametrize("text", ["word " * 20_000, "x" * 50_000, "```py\n" + "a = 1\n" * 9_000, "- item\n" * 9_000,
                                  "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 5_000])
def test_no_block_grows_without_bound(text):
    blocks = cut([text])
    assert "".join(block.source for block in blocks) == text
    assert max(len(block.source) for block in blocks) <= MAX_BLOCK + 20


def test_a_cut_fence_opens_again_and_a_cut_table_repeats_its_head():
    code = cut(["```py\n" + "a = 1\n" * 600 + "```\n"])
    assert len(code) > 1
    assert all(block.markdown.startswith("```py\n") and block.markdown.endswith("```") for block in code)
    table = cut(["| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 600])
    assert all(block.markdown.startswith("| a | b |\n|---|---|\n") for block in table)


@pytest.mark.parametrize("text, num_blocks", [
    ("one\n\ntwo\n\nthree", 3), ("- a\n\n  more of a\n\n- b\n", 2), ("text\n```\ncode\n\ncode\n```\nafter", 3), ("# a\ntext\n", 1),
    ("```\nx\n```\n\n\nafter", 2)])
def test_blocks_end_where_markdown_blocks_end(text, num_blocks):
    assert len(cut([text])) == num_blocks


def test_code_blocks_are_found_also_unclosed():
    assert code_blocks("a\n```py\nx\n\ny\n```\nb\n~~~\n```\n~~~\n```\nopen") == ["x\n\ny", "```", "open"]
