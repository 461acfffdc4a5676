"""Batches of training text from worker processes.

A batch holds sequences of one length class, each a whole conversation from position 0.
Every worker makes whole batches on its own, from its own seed; classes come in shares of the tokens. What a conversation leaves of
its row holds random tokens in pieces that come again (`repeats`), and so do whole batches, most of them early in the run: what comes
again can only be foretold by looking back for it, which is what copying and calling unknown tools need.
"""

from __future__ import annotations

import os
import queue
import random
import sys
from collections import deque
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
SHARES = {128: 3, 256: 12, 512: 29, 1024: 21, 2048: 9, 4096: 14, 8192: 12}
EARLY_SHARES = {128: 12, 256: 20, 512: 36, 1024: 20, 2048: 5, 4096: 4, 8192: 3}
"""Length class -> its share of the steps, percent; early: until EARLY of the run."""
EARLY = 0.15
XML_SHARE = 0.25
EFFORTS = (None, None, None, None, "low", "medium", "xhigh")
REPEAT_WEIGHT = 0.25
"""Of a token that was seen before in the same company."""
REPEAT_BATCHES = ((0.05, 0.6), (0.12, 0.25), (0.4, 0.1), (0.9, 0.06), (1.0, 0.0))
"""(until this share of the run, share of the batches that are `repeats` alone)."""
REPEAT_LENGTH = 8192
"""The longest class whose rows are filled up."""
WAITING, WAITING_LATE = 3, 40
"""Batches a worker may be ahead; late: where the mixture no longer changes with the run's share, so that what is made while the network
is fused is not lost."""


def repeats(rng: np.random.Generator, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights): pieces of random tokens, each of which comes several times in any order. A piece's first token and all of its
    first time have weight 0."""
    longest = int(rng.choice((3, 8, 24, 64)))
    count = max(1, int(length / (longest * rng.uniform(1.5, 4))))
    pieces = [rng.integers(0, vocabulary, rng.integers(2, longest + 1)) for _ in range(count)]
    ids, weights, seen, size = [], [], set(), 0
    while size < length:
        index = len(seen) if len(seen) < count and rng.random() < 0.5 else int(rng.integers(0, count))
        piece = pieces[index]
        weight = np.full(len(piece), REPEAT_WEIGHT if index in seen else 0.0, np.float32)
        weight[0] = 0.0
        seen.add(index)
        ids.append(piece)
        size += len(piece)
        weights.append(weight)
    return np.concatenate(ids)[:length], np.concatenate(weights)[:length]


def repeat_batch(rng: random.Random, renderer: object, length: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rows, numbers = max(1, num_tokens // length), np.random.default_rng(rng.getrandbits(32))
    vocabulary = min(renderer.tokenizer.control_ids.values())
    made = [repeats(numbers, length, vocabulary) for _ in range(rows)]
    return np.stack([ids for ids, _ in made]).astype(np.uint16), np.stack([weights for _, weights in made]).astype(np.float16)


def make_batch(renderer: object, rng: random.Random, length: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint16, weights float16), both [num_tokens // length, length]."""
    from curriculum.mix import conversation

    rows = max(1, num_tokens // length)
    tokens = np.full((rows, length), renderer.tokenizer.control_ids["<|endoftext|>"], np.uint16)
    weights = np.zeros((rows, length), np.float16)
    row, numbers = 0, np.random.default_rng(rng.getrandbits(32))
    vocabulary = min(renderer.tokenizer.control_ids.values())
    while row < rows:
        dialect = "xml" if rng.random() < XML_SHARE else "json"
        ids, weight = renderer.training(conversation(rng, length), dialect, rng.choice(EFFORTS))
        if len(ids) <= length:
            tokens[row, :len(ids)], weights[row, :len(ids)] = ids, weight
            if len(ids) + 16 < length and length <= REPEAT_LENGTH:
                rest = repeats(numbers, length - len(ids) - 1, vocabulary)
                tokens[row, len(ids) + 1:], weights[row, len(ids) + 1:] = rest
            row += 1
    return tokens, weights


def renderer_of_worker(tokenizer_path: str) -> object:
    """In a process of its own that makes text: one thread, behind the process that trains; made words are of all the tokenizer's pieces."""
    torch.set_num_threads(1)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from curriculum.random_words import know_pieces
    from curriculum.render import Renderer
    from q27app.chat.tokenizer import Tokenizer

    os.nice(5)
    renderer = Renderer(Tokenizer.from_file(tokenizer_path))
    know_pieces([renderer.tokenizer.decode([token]) for token in range(min(renderer.tokenizer.control_ids.values()))])
    return renderer


def work(tokenizer_path: str, num_tokens: int, seed: int, out: object, share: object, longest: int) -> None:
    """A worker: batches of length classes up to `longest` into the queue until it is ended."""
    renderer, rng = renderer_of_worker(tokenizer_path), random.Random(seed)
    while True:
        shares = {length: part for length, part in (EARLY_SHARES if share.value < EARLY else SHARES).items() if length <= longest}
        length = rng.choices(list(shares), list(shares.values()))[0]
        alone = next(chance for until, chance in REPEAT_BATCHES if share.value <= until)
        if length <= REPEAT_LENGTH and rng.random() < alone:
            out.put(repeat_batch(rng, renderer, length, num_tokens))
        else:
            out.put(make_batch(renderer, rng, length, num_tokens))


class BatchSource:
    """Owns the workers. next() -> (ids int64, weights float32) of [batch, time]; close() ends them. share.value: of the run that is done,
    at first `done`.

    again: how many earlier batches are kept, to be taken once more where no new one is ready (0: wait). waited and repeated count.
    """

    def __init__(self, tokenizer_path: Path, tokens_per_step: int, workers: int, seed: int, longest: int = 8192,
                 waiting: int = WAITING, again: int = 0, is_pinned: bool = False, done: float = 0.0) -> None:
        context = get_context("spawn")
        self._queue = context.Queue(maxsize=waiting * workers)
        self._kept: deque = deque(maxlen=again)
        self._is_pinned = is_pinned
        self.share = context.Value("d", done, lock=False)
        self._workers = [
            context.Process(target=work, daemon=True,
                            args=(str(tokenizer_path), tokens_per_step, seed * 1000 + index, self._queue, self.share, longest))
            for index in range(workers)]
        for worker in self._workers:
            worker.start()
        self.waited = self.repeated = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next finished batch; raises RuntimeError if the workers ended."""
        try:
            tokens, weights = self._queue.get_nowait()
            self._kept.append((tokens, weights))
        except queue.Empty:
            if len(self._kept) * 4 >= (self._kept.maxlen or 1):
                self.repeated += 1
                tokens, weights = self._kept.popleft()
            else:
                self.waited += 1
                tokens, weights = self._wait()
        found = torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(weights.astype(np.float32))
        return (found[0].pin_memory(), found[1].pin_memory()) if self._is_pinned else found

    def _wait(self) -> tuple[np.ndarray, np.ndarray]:
        while True:
            try:
                return self._queue.get(timeout=20)
            except queue.Empty:
                if not any(worker.is_alive() for worker in self._workers):
                    raise RuntimeError("the workers that make batches ended; run one alone to see why") from None

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()
