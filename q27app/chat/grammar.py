"""Constraints on an answer: which ids may come next so that a JSON schema, or the form of a tool call, is kept.

`Constraints` belongs to one vocabulary and compiles; a `Constraint` is the state of one answer and sits in its guide,
which applies it from the first token after reasoning on. The work is llguidance's; what is written here is the grammar:

    answer      blanks, then a value of the schema; where tools are offered as well, or calls of them
    json call   {"name": "NAME", "arguments": ARGUMENTS} + newline + </tool_call>
    xml call    <function=NAME>, <parameter=KEY> in the schema's order, each value up to its closer, </function>, </tool_call>

Arguments come in the order of the schema's properties, so the schemas have to have the order in which the model saw them (`as_printed`): in
another one it leaves out what it would have written earlier, or makes names up.

Nothing is enforced in part: a schema with a keyword that cannot be enforced is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from q27app.chat.tokenizer import Tokenizer
from q27app.chat.types import Tool
from q27app.errors import BadRequest, Q27Error

if TYPE_CHECKING:
    import numpy as np

MAX_SOURCE_CHARS = 262_144
CALL_OPEN, CALL_CLOSE = "<tool_call>\n", "\n</tool_call>"
SPACE = "[ \\n\\t]{0,20}"
"""Between the tokens of a JSON value: enough for a layout, too little for a model that would write blanks for ever."""
_TYPED = ("integer", "number", "boolean", "array", "object")
_HEAD = "BLANKS: /[ \\n\\t]{0,8}/\n"


def is_available() -> bool:
    """Whether the library that compiles constraints is installed."""
    import importlib.util

    return importlib.util.find_spec("llguidance") is not None


class Constraint:
    """The state of one answer. Owned by the engine thread once the request is submitted."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._mask: np.ndarray | None = None

    @property
    def is_done(self) -> bool:
        """Nothing may follow."""
        return bool(self._matcher.is_stopped())

    def advance(self, tokens: Sequence[int]) -> None:
        """Tokens that were drawn under the mask. Raises Q27Error if one is not allowed."""
        self._mask = None
        if not self._matcher.consume_tokens(list(tokens)):
            raise Q27Error("the answer left the form that the request asks for.")

    def mask(self, prefix: Sequence[int]) -> np.ndarray:
        """Allowed ids after everything advanced and `prefix`, end-of-text where the answer may end: uint32, a bit an id."""
        import numpy as np

        if not prefix and self._mask is not None:
            return self._mask
        count = self._matcher.try_consume_tokens(list(prefix)) if prefix else 0
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]
        if count:
            self._matcher.rollback(count)
        if not prefix:
            self._mask = mask
        return mask


class Constraints:
    """Compiles for one tokenizer. vocab_size: columns of the logits. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self._vocab_size = vocab_size
        wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
        self._vocabulary = LLTokenizer(wrapper, eos_token=list(tokenizer.eos_ids))

    def compile(self, source: str, param: str) -> Constraint:
        """The constraint of a grammar that `answer_source` or `calls_source` wrote.

        Raises BadRequest that blames `param` for what cannot be enforced, or only with too much work.
        """
        from llguidance import LLMatcher

        if len(source) > MAX_SOURCE_CHARS:
            raise BadRequest(
                f"{param}: the schemas make a grammar of {len(source)} characters, at most {MAX_SOURCE_CHARS} are "
                "allowed.",
                "Offer fewer or smaller schemas.",
                param,
            )
        grammar = LLMatcher.grammar_from_lark(source)
        problem = LLMatcher.validate_grammar(grammar, self._vocabulary)
        if problem:
            raise BadRequest(
                f"{param}: the schema cannot be enforced: {_reason(problem)}.", "Leave that keyword out.", param
            )
        return Constraint(LLMatcher(self._vocabulary, grammar, log_level=0), self._vocab_size)


def _reason(problem: str) -> str:
    """llguidance's message without the place in a grammar that the client never saw."""
    words = " ".join(re.split(r"\n\s*\d+ \| ", problem)[0].split())
    return words.rpartition("failed to compile JSON schema: ")[2][:300].rstrip(".")


class _Vocabulary:
    """A tokenizer in the terms of llguidance. Ids that stand for no text are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token, raw in enumerate(self.tokens) if not raw]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        """Where a grammar leaves no choice, its text is drawn in these ids: markers are control tokens there."""
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, control=True)


# ---------------------------------------------------------------------------- grammars


def answer_source(schema: Mapping[str, Any], tools: Sequence[Tool] = (), dialect: str = "json", parallel: bool = True) -> str:
    """An answer that is a value of `schema`, or, where `tools` are offered, calls of them."""
    writer = _Writer(dialect)
    value = writer.rule(f"%json {_schema_text(schema)}")
    if not tools:
        return writer.source(f"BLANKS {value}")
    calls = writer.calls(tools, parallel)
    return writer.source(f"BLANKS ({value} | {_quoted(CALL_OPEN)} {calls})")


def calls_source(tools: Sequence[Tool], dialect: str, parallel: bool = True) -> str:
    """An answer that begins inside a call and is calls of `tools` alone, one if not `parallel`."""
    writer = _Writer(dialect)
    return writer.source(f"BLANKS {writer.calls(tools, parallel)}")


def as_printed(tools: Sequence[Tool], sorts_keys: bool) -> Sequence[Tool]:
    """The tools with their parameters in the order that a template prints; see Template.sorts_keys."""
    if not sorts_keys:
        return tools
    return [replace(tool, parameters=json.loads(json.dumps(tool.parameters, sort_keys=True))) for tool in tools]


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._rules: list[str] = []

    def source(self, start: str) -> str:
        return f"start: {start}\n{_HEAD}" + "\n".join(self._rules) + "\n"

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def calls(self, tools: Sequence[Tool], parallel: bool) -> str:
        write = self._xml_call if self._dialect == "xml" else self._json_call
        call = self.rule(" | ".join(write(tool) for tool in tools))
        return f"{call} (BLANKS {_quoted(CALL_OPEN)} {call})*" if parallel else call

    def _json_call(self, tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        value = self.rule(f"%json {_schema_text(_object_schema(tool.parameters))}")
        return self.rule(f"{_quoted(head)} {value} {_quoted('}' + CALL_CLOSE)}")

    def _xml_call(self, tool: Tool) -> str:
        schema = _object_schema(tool.parameters)
        properties = schema.get("properties")
        required = schema.get("required")
        parts = [_quoted(f"<function={tool.name}>\n")]
        for key, part in (properties if isinstance(properties, dict) else {}).items():
            is_needed = isinstance(required, list) and key in required
            parts.append(self._parameter(key, part, schema) + ("" if is_needed else "?"))
        if not properties and schema.get("additionalProperties") is not False:
            free = self.rule('/(?s:.*)/', '[suffix="\\n</parameter>\\n"]')
            parts.append(f'("<parameter=" /[^>\\n]{{1,128}}/ ">\\n" {free})*')
        parts.append(_quoted("</function>" + CALL_CLOSE))
        return self.rule(" ".join(parts))

    def _parameter(self, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        head = _quoted(f"<parameter={key}>\n")
        schema = schema if isinstance(schema, dict) else {}
        words = schema.get("enum")
        if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            return self.rule(f"{head} ({' | '.join(map(_quoted, words))}) {_quoted(_CLOSER)}")
        if schema.get("type") in _TYPED:
            shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return self.rule(f"{head} %json {_schema_text({**schema, **shared})} {_quoted(_CLOSER)}")
        free = self.rule("/(?s:.*)/", f"[suffix={_quoted(_CLOSER)}]")
        return self.rule(f"{head} {free}")


_CLOSER = "\n</parameter>\n"


def _object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's parameters as the schema of an object, without what only describes the schema."""
    return {"type": "object", **{key: value for key, value in parameters.items() if key not in ("$schema", "$id")}}


def _schema_text(schema: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in schema.items() if key not in ("$schema", "$id")}
    return json.dumps({**plain, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": SPACE}})


def _quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
