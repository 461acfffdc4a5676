"""Trains the demo model on one GPU.

    python training/train.py --tokenizer FILE --out DIR [--minutes 12] [--stop-after 9] [--resume]

Batches hold sequences of one length class, each a whole conversation from position 0, made by worker processes while the
card works. The loss is the cross entropy of the tokens that the curriculum weights, plus that of the draft depths: one depth
at every length, DRAFT_DEPTHS where sequences are short. The last part of the run trains at rounded weights (`quantise`), so
that the 4-bit tiers keep the scores. The run goes by the clock: the learning rate is a function of the share of --minutes
that is used up, so a resumed run goes on where it was. `DIR/last.pt` is the checkpoint, `DIR/loss.csv` has a line every ten steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from data import SHARES, WAITING, WAITING_LATE, BatchSource  # noqa: E402
from evaluate import scores  # noqa: E402
from model import Config, Network  # noqa: E402
from optimizer import make_optimizers  # noqa: E402
from quantise import Rounding  # noqa: E402
from recorded import Recorded  # noqa: E402

MATRIX_LR = 0.02
OTHER_LR = 0.003
WARMUP = 0.01
DECAY_FROM = 0.62
ROUND_FROM = 0.80
ROUND_SHARE = 0.8
"""Of the steps from then on; the others keep the unrounded weights good for the 8-bit tier."""
DRAFT_DEPTHS = 4
DRAFT_MAX_LENGTH = 512
DRAFT_EVERY = 4
"""Until DRAFTS_FROM drafts are trained on one step in so many, then on every one."""
DRAFTS_FROM = 0.93
DRAFT_PART = 4
"""Drafts are trained on one in so many sequences."""
DRAFT_WEIGHT = 0.2
SAVE_EVERY_S = 60
RECORDING_S = 45
"""No more steps are recorded after so many seconds of it."""
REFILL_STEPS = 40
"""Rates rise over so many steps where the optimizers start anew on trained weights: until their momenta mean something."""


def learning_rate(share: float, highest: float = 1.0) -> float:
    """Factor of the base rate after `share` of the run: short warm-up, flat, linear to a fiftieth. highest: no more than this, for
    a part that only mends what is learnt."""
    if share < WARMUP:
        return min(highest, share / WARMUP)
    if share < DECAY_FROM:
        return highest
    return min(highest, max(0.02, 1.0 - 0.98 * (share - DECAY_FROM) / (1.0 - DECAY_FROM)))


def ahead(values: torch.Tensor, steps: int) -> torch.Tensor:
    """Row p becomes row p + steps; zeros at the end."""
    return torch.nn.functional.pad(values[:, steps:], (0, steps))


def losses_of(network: Network, tokens: torch.Tensor, weights: torch.Tensor, depths: int) -> list[torch.Tensor]:
    """[main, draft depth 1, ... depths] for tokens and their weights [batch, time]."""
    hidden = network.hidden(tokens)
    return [mean_loss(network, hidden, ahead(tokens, 1), ahead(weights, 1)), *draft_losses(network, hidden, tokens, weights, depths)]


def draft_losses(network: Network, hidden: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, depths: int) -> list[torch.Tensor]:
    """[depth 1, ... depths], of some of the sequences; hidden: `network.hidden(tokens)`."""
    found, pairs, kept = [], [], max(1, len(tokens) // DRAFT_PART)
    hidden, tokens, weights = hidden[:kept], tokens[:kept], weights[:kept]
    for depth in range(1, depths + 1):
        hidden = network.draft(hidden, ahead(tokens, depth), depth, pairs)
        weight = ahead(weights, depth + 1)
        weight = weight * (weight == 1.0)  # drafts are made of what the model writes
        found.append(mean_loss(network, hidden, ahead(tokens, depth + 1), weight))
    return found


def mean_loss(network: Network, hidden: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Cross entropy of rows after a final norm, in the mean by weight; hidden [batch, time, hidden], the others [batch, time]."""
    losses, weight = network.parts["row_losses"](network, hidden.flatten(0, 1), targets.flatten()), weight.flatten()
    return (losses * weight).sum() / weight.sum().clamp(min=1.0)


def drafts_of(length: int) -> int:
    """How many depths are trained at this length, on steps that train any."""
    return DRAFT_DEPTHS if length <= DRAFT_MAX_LENGTH else 1


def save_half(path: Path, network: Network, used: float, step: int) -> None:
    """The weights alone, matrices in float16: half the size, and nothing that a Q8 file would notice."""
    weights = {name: value.half() if value.dim() == 2 else value for name, value in network.state_dict().items()}
    aside = path.with_suffix(".part")
    torch.save({"config": network.config, "weights": weights, "used_seconds": used, "step": step}, aside)
    os.replace(aside, path)


def save(path: Path, network: Network, optimizers: list, used: float, step: int) -> None:
    aside = path.with_suffix(".part")
    torch.save({"config": network.config, "weights": network.state_dict(), "used_seconds": used, "step": step,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, aside)
    os.replace(aside, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0, help="whole run, resumed parts together")
    parser.add_argument("--until", type=float, default=float("inf"), metavar="EPOCH", help="clock at which the run is over, whatever --minutes says")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes of this part; the run resumes later")
    parser.add_argument("--stop-at", type=float, default=float("inf"), metavar="EPOCH", help="clock at which this part ends; the run resumes later")
    parser.add_argument("--highest", type=float, default=1.0, metavar="FACTOR", help="of the base rates that this part may reach")
    parser.add_argument("--tokens", type=int, default=98304, help="tokens a step")
    parser.add_argument("--longest", type=int, default=8192, help="leave out longer length classes; small ones try the script on a CPU")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--again", type=int, default=0, metavar="N", help="where no batch is ready, take one of the last N once more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from last.pt in --out")
    parser.add_argument("--start", type=Path, metavar="HALF.pt", help="go on from half.pt of an earlier part, optimizers anew")
    parser.add_argument("--profile", action="store_true", help="print where the card's time goes in a few early steps")
    parser.add_argument("--compile", action="store_true", help="fuse the parts of the network; a minute at the start")
    parser.add_argument("--record", action="store_true", help="steps from recorded CUDA graphs where that can be done; with --compile")
    parser.add_argument("--evaluate", type=int, default=0, metavar="N", help="held-out examples of each set at the end")
    parser.add_argument("--reserve", type=float, default=0.0, metavar="GB", help="take this much of the GPU's memory before anything else does")
    parser.add_argument("--exact", action="store_true", help="the delta rule in float32 on a GPU too")
    parser.add_argument("--small", action="store_true", help="a tiny network, to try the script on a CPU")
    return parser.parse_args()


class Run:
    """One part of a training run: network, optimizers, clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(options.seed)
        if options.reserve and self.device == "cuda":
            torch.empty(int(options.reserve * 1e9), dtype=torch.uint8, device=self.device)
        torch.set_float32_matmul_precision("high")
        options.out.mkdir(parents=True, exist_ok=True)
        self.checkpoint = options.out / "last.pt"
        small = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256} if options.small else {}
        self.network = Network(Config(**small)).to(self.device)
        if self.device == "cuda" and not options.exact:
            self.network.delta_type = torch.bfloat16
        self.optimizers = make_optimizers(self.network, MATRIX_LR, OTHER_LR)
        self.rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.rounding = Rounding(self.network)
        self.gradients = self._gradients
        self.used_before, self.step, self.refills = 0.0, 0, REFILL_STEPS
        if options.resume and self.checkpoint.exists():
            self._load()
        elif options.start:
            saved = torch.load(options.start, map_location=self.device, weights_only=False)
            self.network.load_state_dict(saved["weights"])
            self.used_before, self.step, self.refills = saved["used_seconds"], saved["step"], 0
        self.started = time.monotonic()
        self.total = 60.0 * options.minutes

    def begin(self) -> None:
        """Start the clock; a run that must end earlier than planned has its rates fall earlier too."""
        self.started = time.monotonic()
        self.total = max(1.0, min(60.0 * self.options.minutes, self.used_before + self.options.until - time.time()))

    def _load(self) -> None:
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=False)
        self.network.load_state_dict(saved["weights"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.used_before, self.step = saved["used_seconds"], saved["step"]

    @property
    def used(self) -> float:
        return self.used_before + time.monotonic() - self.started

    def _warm_up(self, source: BatchSource) -> None:
        """Fuse what is to be fused before the clock starts, by the gradients of a step with drafts and of one without, no update; then
        record steps of every length."""
        options, (tokens, weights) = self.options, source.next()
        for drafts in (DRAFT_DEPTHS, 0) if options.compile else ():
            self._gradients(tokens.view(-1, 256).to(self.device), weights.view(-1, 256).to(self.device), drafts)
            self.network.zero_grad(set_to_none=True)
        print(f"fused after {time.monotonic() - self.started:.0f} s", flush=True)
        if options.record and self.device == "cuda":
            recorded = Recorded(self.network, self._gradients)
            shapes = [(length, drafts) for length in sorted(SHARES, key=SHARES.get, reverse=True) if length <= options.longest
                      for drafts in (0, drafts_of(length))]
            if recorded.prepare(tokens, weights, shapes, time.time() + RECORDING_S):
                self.gradients = recorded
            print(f"recorded after {time.monotonic() - self.started:.0f} s, "
                  f"{torch.cuda.max_memory_reserved() / 1e9:.0f} GB", flush=True)

    def _gradients(self, tokens: torch.Tensor, weights: torch.Tensor, drafts: int) -> list[torch.Tensor]:
        """Add a step's gradients to the parameters' and return its losses, not yet waited for."""
        tokens, weights = (part.to(self.device, non_blocking=True) for part in (tokens, weights))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            losses = losses_of(self.network, tokens, weights, drafts)
        (losses[0] + DRAFT_WEIGHT * sum(losses[1:])).backward()
        return losses

    def train_step(self, tokens: torch.Tensor, weights: torch.Tensor, share: float) -> list[torch.Tensor]:
        """One update; its losses, not yet waited for."""
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * learning_rate(share, self.options.highest) * min(1.0, (self.refills + 1) / REFILL_STEPS)
        self.refills += 1
        has_drafts = share >= DRAFTS_FROM or self.step % DRAFT_EVERY == 0
        is_rounded = share >= ROUND_FROM and random.random() < ROUND_SHARE
        if is_rounded:
            self.rounding.apply()
        losses = self.gradients(tokens, weights, drafts_of(tokens.shape[1]) if has_drafts else 0)
        if is_rounded:
            self.rounding.restore()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.network.zero_grad(set_to_none=True)
        self.step += 1
        return losses

    def run(self) -> None:
        options = self.options
        is_late = self.used_before > 0.5 * self.total
        source = BatchSource(options.tokenizer, options.tokens, options.workers, seed=options.seed + self.step, longest=options.longest,
                             waiting=WAITING_LATE if is_late else WAITING, again=options.again, is_pinned=self.device == "cuda",
                             done=min(1.0, self.used_before / self.total))
        if options.compile:
            self.network.compile_parts()
        random.seed(options.seed + self.step)
        self._warm_up(source)
        self.begin()
        saved_at = time.monotonic()
        first_step, timings = self.step, {}
        with (options.out / "loss.csv").open("a", newline="") as log_file:
            log = csv.writer(log_file)
            while True:
                share = self.used / self.total
                if share >= 1.0 or time.monotonic() - self.started > 60 * options.stop_after or time.time() > options.stop_at:
                    break
                before, source.share.value = time.monotonic(), min(share, 1.0)
                if options.profile and self.step - first_step == 40:
                    self._profile(source, share)
                tokens, weights = source.next()
                losses = self.train_step(tokens, weights, share)
                if self.step % 10 == 0:
                    values = [round(float(loss.detach()), 4) for loss in losses]
                    log.writerow([self.step, round(self.used, 1), round(share, 4), tokens.shape[1], *values])
                    if self.step % 100 == 0 or self.step - first_step <= 50:
                        log_file.flush()
                        print(f"step {self.step} {self.used:.0f} s, share {share:.3f}, length {tokens.shape[1]}, losses {values}, "
                              f"waited {source.waited}", flush=True)
                    if not all(value == value for value in values):
                        raise RuntimeError(f"the loss is no number at step {self.step}: {values}")
                timings.setdefault((tokens.shape[1], len(losses) - 1), []).append(time.monotonic() - before)
                if time.monotonic() - saved_at > SAVE_EVERY_S:
                    save(self.checkpoint, self.network, self.optimizers, self.used, self.step)
                    save_half(options.out / "half.pt", self.network, self.used, self.step)
                    saved_at = time.monotonic()
        save(self.checkpoint, self.network, self.optimizers, self.used, self.step)
        save_half(options.out / "half.pt", self.network, self.used, self.step)
        source.close()
        spent = max(1e-9, time.monotonic() - self.started)
        print(f"stopped at step {self.step}, {self.used / 60:.2f} minutes used; {spent / max(1, self.step - first_step) * 1e3:.0f} ms a "
              f"step, {(self.step - first_step) * options.tokens / spent:.0f} tokens/s, waited for {source.waited} batches, "
              f"took {source.repeated} again")
        for key, values in sorted(timings.items()):
            print(f"length {key[0]}, drafts {key[1]}: {len(values)} steps, host median {sorted(values)[len(values) // 2] * 1e3:.0f} ms")

    def _profile(self, source: BatchSource, share: float) -> None:
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        begin = time.monotonic()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(6):
                self.train_step(*source.next(), share)
            torch.cuda.synchronize()
        print(f"profiled 6 steps in {time.monotonic() - begin:.2f} s")
        print(found.key_averages().table(sort_by="cuda_time_total", row_limit=32, max_name_column_width=70))

    def evaluate(self, count: int) -> None:
        """Print held-out scores at float32, Q8 and Q4 weights, and write them to scores.json."""
        from curriculum.render import Renderer
        from model import PARTS
        from q27app.chat.tokenizer import Tokenizer

        self.network.parts, self.gradients = dict(PARTS), self._gradients
        renderer, found = Renderer(Tokenizer.from_file(self.options.tokenizer)), {}
        for tier in ("f32", "q8", "q4s"):
            if tier != "f32":
                self.rounding.apply(tier)
            found[tier] = scores(self.network, renderer, count)
            if tier != "f32":
                self.rounding.restore()
            print(tier, json.dumps(found[tier]), flush=True)
        (self.options.out / "scores.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    options = parse()
    run = Run(options)
    run.run()
    if options.evaluate:
        run.evaluate(options.evaluate)


if __name__ == "__main__":
    main()
