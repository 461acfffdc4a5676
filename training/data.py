"""Batches of training text from worker processes.

A batch holds sequences of one length class, each a whole conversation from position 0, padded with <|endoftext|> of weight 0.
Every worker makes whole batches on its own, from its own seed; classes come in shares of the tokens.
"""

from __future__ import annotations

import queue
import random
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
SHARES = {128: 14, 256: 20, 512: 30, 1024: 14, 2048: 6, 4096: 11, 8192: 5}
"""Length class -> its share of the steps, percent."""
XML_SHARE = 0.25
EFFORTS = (None, None, None, None, "low", "medium", "xhigh")
WAITING = 3
"""Batches a worker may be ahead."""


def make_batch(renderer: object, rng: random.Random, length: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint16, weights float16), both [num_tokens // length, length]."""
    from curriculum.mix import conversation

    rows = max(1, num_tokens // length)
    tokens = np.full((rows, length), renderer.tokenizer.control_ids["<|endoftext|>"], np.uint16)
    weights = np.zeros((rows, length), np.float16)
    row = 0
    while row < rows:
        dialect = "xml" if rng.random() < XML_SHARE else "json"
        ids, weight = renderer.training(conversation(rng, length), dialect, rng.choice(EFFORTS))
        if len(ids) <= length:
            tokens[row, :len(ids)], weights[row, :len(ids)] = ids, weight
            row += 1
    return tokens, weights


def work(tokenizer_path: str, num_tokens: int, seed: int, out: object) -> None:
    """A worker: batches into the queue until it is ended."""
    torch.set_num_threads(1)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from curriculum.render import Renderer
    from q27app.chat.tokenizer import Tokenizer

    renderer, rng = Renderer(Tokenizer.from_file(tokenizer_path)), random.Random(seed)
    lengths, shares = list(SHARES), list(SHARES.values())
    while True:
        out.put(make_batch(renderer, rng, rng.choices(lengths, shares)[0], num_tokens))


class BatchSource:
    """Owns the workers. next() -> (ids int64, weights float32) of [batch, time]; close() ends them."""

    def __init__(self, tokenizer_path: Path, tokens_per_step: int, workers: int, seed: int) -> None:
        context = get_context("spawn")
        self._queue = context.Queue(maxsize=WAITING * workers)
        self._workers = [
            context.Process(target=work, args=(str(tokenizer_path), tokens_per_step, seed * 1000 + index, self._queue), daemon=True)
            for index in range(workers)]
        for worker in self._workers:
            worker.start()
        self.waited = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next finished batch; raises RuntimeError if the workers ended."""
        try:
            tokens, weights = self._queue.get_nowait()
        except queue.Empty:
            self.waited += 1
            while True:
                try:
                    tokens, weights = self._queue.get(timeout=20)
                    break
                except queue.Empty:
                    if not any(worker.is_alive() for worker in self._workers):
                        raise RuntimeError("the workers that make batches ended; run one alone to see why") from None
        return torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(weights.astype(np.float32))

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
