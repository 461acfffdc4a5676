"""What tiers cost and drafts gain on the bundled model: bits per byte of held-out text, and acceptance by draft depth.

Both drive the network directly, without an engine. Acceptance of depth d is the share of drafts that equal the token
which greedy decoding writes there, among those whose d - 1 predecessors did; the draft layer's keys and values are those
that serving would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

import numpy as np

from q27app.bench.demo_eval import Case
from q27app.bench.feeder import Feeder
from q27app.chat.types import Message, ReasoningPart, TextPart, ToolCall, ToolCallPart

MAX_DEPTH = 8
KINDS = {"prose": ("facts", "summaries"), "copy": ("copying",), "tool calls": ("tool_calls",)}
"""Name of a kind of text -> the tasks whose answers are such text."""


def answered(case: Case) -> Case:
    """The case with the expected answer as its last message."""
    said = case.expected
    parts: list[Any] = [ReasoningPart(said["reasoning"])] if "reasoning" in said else []
    if said["text"]:
        parts.append(TextPart(said["text"]))
    parts += [ToolCallPart(ToolCall("", call["name"], call["arguments"])) for call in said.get("calls", ())]
    messages = (*case.request.messages, Message("assistant", tuple(parts)))
    return replace(case, request=replace(case.request, messages=messages))


def bits_per_byte(path: Path, cases: Sequence[Case]) -> float:
    """Bits that the model needs for a byte of the cases' answers, given what stands before them."""
    from q27app.chat.template import open_template
    from q27app.chat.tokenizer import Tokenizer
    from q27app.weights.container import open_container

    bits = size = 0.0
    with open_container(path) as container:
        tokenizer = Tokenizer.from_metadata(container.metadata)
        template = open_template(container.metadata, tokenizer)
        for case in cases:
            prompt = list(template.render(case.request, case.thinking).tokens)
            whole = template.render(answered(case).request, case.thinking)
            answer = list(whole.tokens[:whole.stable_len])[len(prompt):]
            feeder = Feeder.open(container, len(prompt) + len(answer))
            logits = feeder.feed(prompt + answer[:-1], "prefill", all_logits=True)[len(prompt) - 1:].astype(np.float64)
            highest = logits.max(-1, keepdims=True)
            normal = highest[:, 0] + np.log(np.exp(logits - highest).sum(-1))
            bits += float((normal - logits[np.arange(len(answer)), answer]).sum()) * log2(np.e)
            size += sum(max(1, len(tokenizer.token_bytes(token))) for token in answer)
    return bits / size


def acceptance(path: Path, cases: Sequence[Case], max_tokens: int = 64) -> dict[str, list[float]]:
    """{kind of text: share of right drafts at depth 1 .. MAX_DEPTH}; see the module."""
    from q27app.chat.template import open_template
    from q27app.chat.tokenizer import Tokenizer
    from q27app.weights.container import open_container

    counts = {kind: np.zeros((2, MAX_DEPTH)) for kind in KINDS}
    with open_container(path) as container:
        tokenizer = Tokenizer.from_metadata(container.metadata)
        template = open_template(container.metadata, tokenizer)
        for case in cases:
            kind = next((name for name, tasks in KINDS.items() if case.task in tasks), None)
            if kind is not None:
                prompt = template.render(case.request, case.thinking).tokens
                counts[kind] += _accepted(Feeder.open(container, len(prompt) + max_tokens + MAX_DEPTH + 2), prompt,
                                          tokenizer.eos_ids, max_tokens)
    return {kind: [float(right / tried) if tried else float("nan") for right, tried in zip(*pair, strict=True)]
            for kind, pair in counts.items()}


def _accepted(feeder: Feeder, prompt: Sequence[int], eos: Sequence[int], max_tokens: int) -> np.ndarray:
    """[2, MAX_DEPTH]: right drafts and tried drafts of one greedy answer."""
    tokens = [int(np.argmax(feeder.feed(prompt, "prefill")[-1]))]
    chains: list[list[int]] = []
    while tokens[-1] not in eos and len(tokens) < max_tokens:
        chains.append(feeder.drafts(tokens[-1], MAX_DEPTH))
        tokens.append(int(np.argmax(feeder.feed(tokens[-1:], "decode")[-1])))
    counts = np.zeros((2, MAX_DEPTH))
    for index, chain in enumerate(chains):
        for depth, (draft, token) in enumerate(zip(chain, tokens[index + 1:], strict=False)):
            counts[1, depth] += 1
            if draft != token:
                break
            counts[0, depth] += 1
    return counts


def probe(path: Path, cases: Sequence[Case]) -> Mapping[str, Any]:
    """{"bits_per_byte", "acceptance"} of one file."""
    return {"bits_per_byte": bits_per_byte(path, cases), "acceptance": acceptance(path, cases)}
