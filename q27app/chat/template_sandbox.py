"""Runs a template source that nobody has read: jinja's immutable sandbox, plus bounds on work and memory.

The source is parsed, and every loop, call and joining operation is led through a budget that belongs to one rendering:

    what                             bound
    items looped over, and calls     MAX_STEPS together, a call counts CALL_STEPS
    a string or list that arises     MAX_SIZE
    the whole output                 MAX_OUTPUT_CHARS
    string methods that only pad     not there
"""

from __future__ import annotations

import json
from typing import Any

from q27app.errors import BadRequest, ModelError

MAX_SOURCE_CHARS = 1 << 20
MAX_STEPS = 2_000_000
CALL_STEPS = 8
MAX_SIZE = 64 << 20
MAX_OUTPUT_CHARS = 64 << 20

_LOOP = "q27_loop"
_JOIN = "q27_join"
_BUDGET = "q27_budget"
_PADDING_METHODS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"])


class _OutOfBounds(Exception):
    """A bound of the sandbox is reached."""


class _Budget:
    """Steps left in one rendering."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise _OutOfBounds(f"over {MAX_STEPS} steps")

    def loop(self, items: Any) -> list[Any]:
        found = list(items)
        self.spend(len(found) + 1)
        return found

    def join(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        size = sum(map(len, texts))
        self.spend(1 + size // 1024)
        if size > MAX_SIZE:
            raise _OutOfBounds(f"a string of {size} characters")
        return "".join(texts)


class SandboxedTemplate:
    """One compiled source. Safe to run from several threads.

    Raises ModelError if the source does not compile; `run` raises BadRequest with the template's words.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS or "q27_" in source:
            raise ModelError(
                f"the checkpoint's chat template of {len(source)} characters is not run: at most {MAX_SOURCE_CHARS} "
                "characters, and no name with q27_ in it.", "Choose a rendering: --chat-template json.",
            )
        self._template = _compile(source)

    def run(self, **variables: Any) -> str:
        """The text for these variables."""
        budget = _Budget()
        own = {_LOOP: budget.loop, _JOIN: budget.join, _BUDGET: budget}
        pieces, size = [], 0
        try:
            for piece in self._template.generate(**variables, **own):
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise _OutOfBounds(f"output over {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except Exception as error:  # whatever the source does wrong is the template's refusal
            reason = str(error)[:300] or type(error).__name__
            raise BadRequest(
                f"the checkpoint's chat template refuses this conversation: {reason}.",
                "Another rendering can be chosen with --chat-template.", param="messages",
            ) from error
        return "".join(pieces)


def _environment() -> Any:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["+", "*", "**", "%"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            context.resolve(_BUDGET).spend(1)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            __context.resolve(_BUDGET).spend(CALL_STEPS)
            if getattr(__obj, "__name__", "") == "replace" and isinstance(getattr(__obj, "__self__", None), str):
                _check_replace(__obj.__self__, *args[:2])
            return super().call(__context, __obj, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> None:
            """No formatting, also not jinja's guarded one: a width is a size."""
            return None

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            if isinstance(obj, (str, bytes)) and attr in _PADDING_METHODS:
                return False
            return super().is_safe_attribute(obj, attr, value)

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(str(message)[:300])

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
                sort_keys: bool = False) -> str:
        indent = indent if indent is None else min(int(indent), 16)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], cache_size=0
    )
    replace = environment.filters["replace"]

    @jinja2.pass_eval_context
    def bounded_replace(context: Any, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        _check_replace(str(text), str(old), str(new))
        return replace(context, text, old, new, count)

    environment.filters |= {"tojson": to_json, "replace": bounded_replace}
    for name in ("center", "indent", "format", "wordwrap", "pprint", "batch", "slice"):
        environment.filters.pop(name, None)
    environment.globals.pop("lipsum", None)
    environment.globals["raise_exception"] = raise_exception
    return environment


def _compile(source: str) -> Any:
    import jinja2
    from jinja2 import nodes

    environment = _environment()
    try:
        tree = environment.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.Name(_LOOP, "load"), [loop.iter], [], None, None, lineno=loop.lineno)
        _replace_joins(tree, nodes)
        tree.set_environment(environment)
        code = environment.compile(tree)
        return environment.template_class.from_code(environment, code, environment.make_globals(None))
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise ModelError(
            f"the checkpoint's chat template does not compile: {str(error)[:200]}.",
            "Choose a rendering: --chat-template json.",
        ) from error


def _replace_joins(node: Any, nodes: Any) -> None:
    """Turns `a ~ b` into a call of the budget's join, everywhere below `node`."""
    for field, value in node.iter_fields():
        items = value if isinstance(value, list) else [value]
        for index, item in enumerate(items):
            if not isinstance(item, nodes.Node):
                continue
            _replace_joins(item, nodes)
            if isinstance(item, nodes.Concat):
                call = nodes.Call(nodes.Name(_JOIN, "load"), item.nodes, [], None, None, lineno=item.lineno)
                if isinstance(value, list):
                    value[index] = call
                else:
                    setattr(node, field, call)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raises where a result could be larger than any template needs."""
    sizes = [len(value) for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
    numbers = [abs(value) for value in (left, right) if isinstance(value, (int, float))]
    if operator == "%" and sizes:
        raise _OutOfBounds("formatting with %")
    if operator == "+" and sum(sizes) > MAX_SIZE:
        raise _OutOfBounds(f"a value of {sum(sizes)} items")
    if operator == "*" and sizes and numbers and max(sizes) * max(numbers) > MAX_SIZE // 64:
        raise _OutOfBounds("a repetition")
    is_large = len(numbers) == 2 and (max(numbers) > 1 << 63 or (operator == "**" and numbers[1] > 64))
    if operator in ("*", "**") and is_large:
        raise _OutOfBounds("a large number")


def _check_replace(text: str, old: Any = "", new: Any = "") -> None:
    if len(text) + len(text) // max(1, len(str(old))) * len(str(new)) > MAX_SIZE:
        raise _OutOfBounds("a replacement")
