"""Scores of the held-out sets by the argmax of every token of the last answer, given the tokens before it.

The examples are those of `q27app/data/demo_eval.jsonl.gz`. Right means that all tokens are the expected ones: what greedy decoding
would write. Stricter than `q27app bench demo-eval`, which judges the answer's content. One forward pass for many examples, so it
can be done while training.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import torch

from curriculum.example import BLIND, Step
from curriculum.looking_up import with_looking_up
from curriculum.mix import Conversation
from curriculum.render import Renderer
from model import Network

MAX_TOKENS = 65536
SETS = Path(__file__).resolve().parents[1] / "q27app" / "data" / "demo_eval.jsonl.gz"


def held_out(count: int) -> list[tuple[str, str, Conversation]]:
    """(task, split, whole conversation): the first `count` of each task and split."""
    found, seen = [], defaultdict(int)
    for line in gzip.decompress(SETS.read_bytes()).splitlines():
        case = json.loads(line)
        key = case["task"], case["split"]
        if case["split"] == BLIND:  # nothing is chosen by it
            continue
        seen[key] += 1
        if seen[key] <= count:
            messages = [*case["messages"], case["expected"]]
            system = messages.pop(0)["text"] if messages[0]["role"] == "system" else None
            steps = tuple(Step(entry["role"], entry["text"], entry.get("reasoning"), tuple(entry.get("calls", ()))) for entry in messages)
            found.append((*key, Conversation(system, tuple(case["tools"]), with_looking_up(steps, case["tools"]))))
    return found


@cache
def rendered(renderer: Renderer, count: int, dialect: str) -> list[tuple[str, str, np.ndarray, int]]:
    """(task, split, ids, where the last answer begins)."""
    found = []
    for task, split, conversation in held_out(count):
        ids, weights = renderer.training(conversation, dialect)
        written = weights == 1.0
        last = int(np.flatnonzero(~written[:int(np.flatnonzero(written)[-1])])[-1]) + 1
        found.append((task, split, ids, last))
    return found


@torch.no_grad()
def scores(network: Network, renderer: Renderer, count: int, dialect: str = "json") -> dict[str, dict[str, float]]:
    """{task: {split: share that is right}} and {"nats": {split: mean loss of an answer's token}}."""
    device = next(network.parameters()).device
    right: dict = defaultdict(lambda: defaultdict(list))
    examples = sorted(rendered(renderer, count, dialect), key=lambda item: len(item[2]))
    while examples:
        width = -(-len(examples[-1][2]) // 64) * 64
        rows = max(1, MAX_TOKENS // width)
        group, examples = examples[-rows:], examples[:-rows]
        tokens = torch.zeros(len(group), width, dtype=torch.int64)
        for row, (_, _, ids, _) in enumerate(group):
            tokens[row, :len(ids)] = torch.from_numpy(ids)
        tokens = tokens.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = network.head(network.hidden(tokens))
        for row, (task, split, ids, begin) in enumerate(group):
            part, expected = logits[row, begin - 1:len(ids) - 1].float(), tokens[row, begin:len(ids)]
            end = int((expected == renderer.tokenizer.control_ids["<|im_end|>"]).nonzero()[-1]) + 1
            part, expected = part[:end], expected[:end]
            right[task][split].append(bool((part.argmax(-1) == expected).all()))
            right["nats"][split].append(float(torch.nn.functional.cross_entropy(part, expected)))
    return {task: {split: round(float(np.mean(values)), 4) for split, values in splits.items()} for task, splits in right.items()}
