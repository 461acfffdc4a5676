"""Scores of the held-out sets by the argmax of every token of the last answer, given the tokens before it.

Right means that all of them are the expected ones: what greedy decoding would write. Stricter than `q27app bench demo-eval`,
which judges the answer's content. One forward pass an example, so it can be done while training.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from curriculum.held_out import held_out
from curriculum.mix import Conversation
from curriculum.render import Renderer
from model import Network

MAX_TOKENS = 65536


def rendered(renderer: Renderer, count: int, dialect: str) -> list[tuple[str, str, np.ndarray, int]]:
    """(task, split, ids, where the last answer begins)."""
    found = []
    for task, split, example in held_out(count):
        conversation = Conversation(example.system, example.tools, example.steps)
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
