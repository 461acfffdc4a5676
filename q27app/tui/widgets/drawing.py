"""Blocks of a conversation as lines of cells, drawn by Rich. Pure: (kind, source, width) -> strips."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from textual.strip import Strip

from q27app.tui.snapshot import printable

_ASCII = str.maketrans({"\u2022": "*", "\u2500": "-", "\u2501": "=", "\u2502": "|", "\u258c": "|", "\u2504": "-", "\u2503": "|",
                        "\u253c": "+", "\u2578": "-", "\u257a": "-", "\u2574": "-", "\u2576": "-"})
STYLES = {"you": "bold cyan", "model": "bold green", "dim": "dim", "note": "yellow", "error": "bold red", "fold": "dim italic",
          "reasoning": "dim", "plain": "", "call": "magenta", "chip": "reverse"}


class _Heading(Heading):
    """At the left, without a box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        text.justify = "left"
        text.stylize("bold underline" if self.tag in ("h1", "h2") else "bold")
        yield text


class _Code(CodeBlock):
    """Highlighted text that folds where it is too long; Rich's own padded block takes twice as long to draw."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        text = Syntax(code, self.lexer_name, theme=self.theme).highlight(code)
        text.no_wrap, text.overflow = False, "fold"
        text.rstrip()
        yield text


class _Markdown(Markdown):
    elements = {**Markdown.elements, "heading_open": _Heading, "fence": _Code, "code_block": _Code}


@cache
def _console() -> Console:
    """Draws for a buffer; what a terminal can do is Textual's business."""
    return Console(width=80, force_terminal=True, color_system="truecolor", legacy_windows=False, _environ={})


def draw(kind: str, source: str, width: int, is_ascii: bool = False, is_dark: bool = True) -> list[Strip]:
    """kind: "markdown", or one of STYLES for text that is wrapped as it stands."""
    source = printable(source)
    if kind == "markdown":
        theme = "ansi_dark" if is_dark else "ansi_light"
        lines = _lines(_Markdown(source, code_theme=theme, hyperlinks=False), width)
        lines = _without_blank_ends(lines)
    else:
        text = Text(source, style=STYLES.get(kind, ""), overflow="fold", tab_size=4)
        lines = _lines(text, width)
    if is_ascii:
        lines = [[Segment(text.translate(_ASCII), style) for text, style, _ in line] for line in lines]
    return [Strip([Segment(text, _bare(style)) for text, style, _ in line]) for line in lines]


@cache
def _bare(style: Style | None) -> Style | None:
    """A style without a background, so that the screen's own shows through."""
    if style is None or style.bgcolor is None:
        return style
    return Style(color=style.color, bold=style.bold, dim=style.dim, italic=style.italic, underline=style.underline,
                 strike=style.strike, reverse=style.reverse)


def _lines(renderable: Markdown | Text, width: int) -> list[list[Segment]]:
    console = _console()
    options = console.options.update(width=max(4, width), height=None)
    return console.render_lines(renderable, options, pad=False)


def _without_blank_ends(lines: Sequence[list[Segment]]) -> list[list[Segment]]:
    def is_blank(line: list[Segment]) -> bool:
        return not "".join(segment.text for segment in line).strip()

    start, end = 0, len(lines)
    while start < end and is_blank(lines[start]):
        start += 1
    while end > start and is_blank(lines[end - 1]):
        end -= 1
    return list(lines[start:end])
