"""Trains one kind of request more, in a last short part on a CPU: requests that only a parameter's name tells.

    python training/tune.py --tokenizer FILE --start HALF.pt --out NEW.pt [--minutes 40]

Rows of drills (`curriculum.looking_up`) stand beside rows of the whole mixture, so that what is learnt is not lost. A few thousand tokens a
step, small rates, products in bfloat16, the 4-bit tier's rounding in half of the steps. The clock is the part's own: the rates are flat
for half of it, then fall. NEW.pt is written every hundred steps.

Much of a step's time on a CPU goes into memory that is given back and asked for again. With the GNU C library this keeps it:
MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from data import XML_SHARE, renderer_of_worker  # noqa: E402
from model import Config, Network  # noqa: E402
from optimizer import make_optimizers  # noqa: E402
from quantise import Rounding  # noqa: E402
from train import DRAFT_WEIGHT, MATRIX_LR, OTHER_LR, ahead, draft_losses, mean_loss, save_half  # noqa: E402

LENGTHS = {512: 60, 1024: 36, 2048: 4}
"""Length class -> its share of the steps, percent."""
WARMUP_STEPS = 20
DECAY_FROM = 0.5
ROUND_SHARE = 0.5
DRAFT_EVERY = 8
DRAFTS_FROM = 0.75
"""Drafts of depth 1 are trained on one step in so many, from then on in every one."""
DRAFT_MAX_LENGTH = 1024
FULL = 0.6
"""A drill's conversation must fill so much of its row."""
SAVE_EVERY = 100


def learning_rate(step: int, share: float, highest: float) -> float:
    """Factor of the base rates: up over the first steps, flat, linear to a fiftieth."""
    fall = 1.0 if share < DECAY_FROM else max(0.02, 1.0 - 0.98 * (share - DECAY_FROM) / (1.0 - DECAY_FROM))
    return highest * min(1.0, (step + 1) / WARMUP_STEPS) * fall


def make_rows(renderer: object, rng: random.Random, length: int, count: int, general: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids int64, weights float32), both [count, length], and which rows have nothing looked up, bool [count]; `general` of the rows are
    of the whole mixture."""
    from curriculum.looking_up import ASKS, lookup_drill, with_looking_up
    from curriculum.mix import Conversation, conversation

    tokens = np.full((count, length), renderer.tokenizer.control_ids["<|endoftext|>"], np.int64)
    weights, plain = np.zeros((count, length), np.float32), np.zeros(count, bool)
    row, is_general = 0, rng.random() < general
    while row < count:
        if is_general:
            found = conversation(rng, length)
        else:
            drill = lookup_drill(rng)
            found = Conversation(None, drill.tools, with_looking_up(drill.steps, drill.tools))
        ids, weight = renderer.training(found, "xml" if rng.random() < XML_SHARE else "json")
        if len(ids) <= length and (is_general or len(ids) > FULL * length):
            tokens[row, :len(ids)], weights[row, :len(ids)] = ids, weight
            plain[row] = is_general and not any(ASKS in f"{step.text}{step.reasoning}" for step in found.steps)
            row, is_general = row + 1, rng.random() < general
    return tokens, weights, plain


def work(tokenizer_path: str, num_tokens: int, general: float, seed: int, out: object) -> None:
    """A worker: rows of one length class after the other into the queue until it is ended."""
    renderer, rng = renderer_of_worker(tokenizer_path), random.Random(seed)
    while True:
        length = rng.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        out.put(make_rows(renderer, rng, length, num_tokens // length, general))


def losses_beside(network: Network, teacher: Network | None, tokens: torch.Tensor, weights: torch.Tensor, plain: torch.Tensor,
                  has_drafts: bool) -> list[torch.Tensor]:
    """As `losses_of` with one depth of drafts or none; but rows where nothing is looked up have the teacher's distribution for their
    target where the model writes, so that what it knew stays as it was."""
    hidden, weight = network.hidden(tokens), ahead(weights, 1)
    by_text = weight * ~plain[:, None] if teacher is not None else weight
    loss = mean_loss(network, hidden, ahead(tokens, 1), by_text)
    if teacher is not None and plain.any():
        written = weight[plain] == 1.0
        with torch.no_grad():
            target = teacher.head(teacher.hidden(tokens[plain])[written]).float().log_softmax(-1)
        found = network.head(hidden[plain][written]).float().log_softmax(-1)
        loss = loss + F.kl_div(found, target, reduction="batchmean", log_target=True)
    return [loss, *draft_losses(network, hidden, tokens, weights, int(has_drafts))]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, metavar="HALF.pt", help="weights to go on from")
    parser.add_argument("--keep", type=Path, metavar="HALF.pt", help="weights whose answers are kept where nothing is looked up")
    parser.add_argument("--out", type=Path, required=True, metavar="NEW.pt")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--highest", type=float, default=0.1, metavar="FACTOR", help="of the base rates")
    parser.add_argument("--general", type=float, default=0.4, metavar="SHARE", help="rows of the whole mixture")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def network_of(saved: dict) -> Network:
    network = Network(Config())
    network.load_state_dict({name: value.float() for name, value in saved["weights"].items()})
    return network


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    context = get_context("spawn")
    queue = context.Queue(maxsize=4)
    worker = context.Process(target=work, daemon=True, args=(str(options.tokenizer), options.tokens, options.general, options.seed, queue))
    worker.start()
    start = torch.load(options.start, map_location="cpu", weights_only=False)
    network, teacher = network_of(start), None
    network.compile_parts()
    if options.keep:
        teacher = network_of(torch.load(options.keep, map_location="cpu", weights_only=False))
    optimizers, rounding = make_optimizers(network, MATRIX_LR, OTHER_LR), Rounding(network)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    began, step = time.monotonic(), 0
    while (share := (time.monotonic() - began) / (60.0 * options.minutes)) < 1.0:
        factor = learning_rate(step, share, options.highest)
        for optimizer, base in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * factor
        tokens, weights, plain = map(torch.from_numpy, queue.get())
        has_drafts = (share > DRAFTS_FROM or step % DRAFT_EVERY == 0) and tokens.shape[1] <= DRAFT_MAX_LENGTH
        is_rounded = random.random() < ROUND_SHARE
        if is_rounded:
            rounding.apply()
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_beside(network, teacher, tokens, weights, plain, has_drafts)
        (losses[0] + DRAFT_WEIGHT * sum(losses[1:])).backward()
        if is_rounded:
            rounding.restore()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        network.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            print(f"step {step} {time.monotonic() - began:.0f} s, share {share:.3f}, length {tokens.shape[1]}, "
                  f"losses {[round(float(loss.detach()), 4) for loss in losses]}", flush=True)
        if step % SAVE_EVERY == 0:
            save_half(options.out, network, start["used_seconds"], start["step"])
    save_half(options.out, network, start["used_seconds"], start["step"])
    print(f"{step} steps, {step * options.tokens} tokens, {step * options.tokens / (time.monotonic() - began):.0f} tokens/s")
    worker.terminate()


if __name__ == "__main__":
    main()
