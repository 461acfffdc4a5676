"""Launchers that choose tokens, and the one small download of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from q27app.errors import Q27Error
from q27app.kernels import cuda_args
from q27app.kernels.batch import Batch, Drafted, Sampled, SamplingRows
from q27app.kernels.cuda_batch import BatchArea
from q27app.kernels.memory import CudaBuffer
from q27app.kernels.staging import Slates

CHUNKS, LIST, MAX_LOGPROBS, MAX_STEPS = 64, 4096, 32, 16


@dataclass(frozen=True)
class Kinds:
    """What any row of a pass needs: noise, penalties, a cut by top-k or top-p, masses for top-p."""

    drawn: bool = False
    penalized: bool = False
    cut: bool = False
    summed: bool = False


def sampler_sizes(vocab: int, max_rows: int, max_seqs: int) -> tuple[int, ...]:
    """Bytes of a Sampler's device buffers, in the order in which it takes them."""
    return (max_rows * (64 + -(-vocab // 32) * 4) + (1 << 20), max_seqs * 80 + 256, max_rows * vocab * 4, max_rows * CHUNKS * 8, max_rows * CHUNKS * 8,
            8 * max_rows + 4 * max_seqs, max_rows * 33 * 4, max_rows * MAX_LOGPROBS * 4, 8 * max_rows * MAX_STEPS,
            max_rows * CHUNKS * 8, max_rows * LIST * 4, max_rows * 8)


class Inputs:
    """Parameters of rows on the device, in one copy from page-locked memory. send: see `CudaBackend.send`."""

    def __init__(self, device, address: int, nbytes: int, send: Callable[[int, np.ndarray], None]) -> None:
        self._address, self._size, self._send = address, nbytes, send
        self._hosts = Slates(device, nbytes)
        self._args = cuda_args.Sample()
        """Where everything lies."""

    def put(self, rows: SamplingRows, limits: np.ndarray | None = None) -> tuple[cuda_args.Sample, int]:
        """Where everything lies, and the limits. limits: of a chain of drafts, whose penalty lists get a place a step.
        The places depend on the number of rows alone where there are neither penalties nor masks. What lies there already is not
        copied again."""
        args, pieces, end, limits_at = cuda_args.Sample(), [], 0, 0
        arrays = {
            "seeds": (rows.seeds, np.uint64), "positions": (rows.positions, np.int64), "temperature": (rows.temperature, np.float32),
            "top_k": (rows.top_k, np.int32), "top_p": (rows.top_p, np.float32), "min_p": (rows.min_p, np.float32),
            "presence": (rows.presence, np.float32), "frequency": (rows.frequency, np.float32),
            "penalty_starts": (rows.penalty_starts, np.int32), "penalty_ids": (rows.penalty_ids, np.int32),
            "penalty_counts": (rows.penalty_counts, np.int32), "num_logprobs": (rows.num_logprobs, np.int32),
        }
        if rows.masks is not None:
            arrays["masks"] = (rows.masks, np.uint32)
            args.mask_words = rows.masks.shape[1]
        if limits is not None:
            arrays |= {"limits": (limits, np.int32)} | (_with_places(rows, int(limits.max())) if _penalizes(rows) else {})
        for name, (values, dtype) in arrays.items():
            data = np.ascontiguousarray(values, dtype).tobytes()
            if name == "limits":
                limits_at = self._address + end
            else:
                setattr(args, name, self._address + end)
            pieces.append(data + bytes(-len(data) % 16))
            end += len(pieces[-1])
        if end > self._size:
            raise Q27Error(f"sampling parameters of {len(rows.temperature)} rows need more than {self._size} bytes.")
        content, is_chain = b"".join(pieces), limits is not None
        if not is_chain and self._hosts.holds(content):
            return self._args, 0
        host = self._hosts.open()
        host[:end] = np.frombuffer(content, np.uint8)
        self._send(self._address, host[:end])
        self._hosts.sent(None if is_chain else content)   # a chain changes it
        self._args = args
        return args, limits_at


class Sampler:
    """sample, accept and result of a backend; owns their small device buffers."""

    def __init__(self, backend, vocab: int, max_rows: int, max_seqs: int) -> None:
        self._backend, self._device = backend, backend.device
        self.max_rows, self.max_seqs, self.vocab = max_rows, max_seqs, vocab
        sizes = sampler_sizes(vocab, max_rows, max_seqs)
        (inputs, ahead, self._work, self._part_best, self._part_top, self._out, self._logprobs, self._logprob_ids, self._drafts,
         self._part_mass, self._list, self._cuts) = map(backend.scratch_arena.take, sizes)
        self._inputs, self._inputs_ahead = (Inputs(self._device, inputs, sizes[0], backend.send),
                                            Inputs(self._device, ahead, sizes[1], backend.send))
        self._ahead: tuple = (None, cuda_args.Sample(), 0)
        """The parameters that lie there, and where."""
        self._sent_host = self._device.pinned(8 * max_rows + 4 * max_seqs)
        self._sent: tuple | None = None
        self._is_fetched = False
        self._held_host = self._device.pinned(8 * max_rows + 4 * max_seqs)
        self._held: tuple | None = None
        self._counts_host = self._device.pinned(4 * max_seqs).view(np.int32)
        self._rows, self._num_logprobs, self._accepted_valid = 0, np.zeros(0, np.int32), False
        self._step, self._chain = 0, cuda_args.Sample()
        self._chain_limits, self._chain_kinds, self._chain_rows = 0, Kinds(), 0
        self._turn: cuda_args.DraftTurn | None = None

    @property
    def tokens(self) -> int:
        return self._out

    @property
    def accepted(self) -> int:
        return self._out + 8 * self.max_rows

    def sample(self, logits: CudaBuffer, rows: SamplingRows) -> None:
        n = len(rows.temperature)
        self._check(logits, n)
        self._rows, self._num_logprobs = n, np.array(rows.num_logprobs, np.int32)
        self._forget_sent()
        self._accepted_valid, self._is_fetched = False, False
        kinds = _kinds(rows)
        args, _ = self._inputs.put(rows if kinds.drawn else replace(rows, positions=np.zeros(n, np.int64)))   # they tell of noise alone
        self._choose(args, logits, kinds, (0, 0))
        if (self._num_logprobs >= 0).any():
            self._backend.launch("sample", "sample_logprobs", (n,), 1024, 0, args)

    def _check(self, logits: CudaBuffer, n: int) -> None:
        if n > self.max_rows or logits.shape[0] < n or logits.shape[1] != self.vocab:
            raise Q27Error(f"sample: {n} rows of logits {list(logits.shape)}, expected at most {self.max_rows} of {self.vocab}.")

    def _choose(self, args: cuda_args.Sample, logits: CudaBuffer, kinds: Kinds, skip: tuple[int, int], is_last: bool = True) -> None:
        """is_last: tokens and margins are there then; else they are what `draft_turn` finds in the parts."""
        n = self._rows
        args.skip_from, args.skip = skip[0], skip[1] - skip[0]
        args.logits, args.n, args.vocab = logits.address, n, self.vocab
        args.part_best, args.part_top = self._part_best, self._part_top
        args.tokens, args.margins = self._out, self._out + 4 * self.max_rows
        args.logprobs, args.logprob_ids = self._logprobs, self._logprob_ids
        args.part_mass, args.list, args.list_sizes, args.floors = self._part_mass, self._list, self._cuts, self._cuts + 4 * self.max_rows
        launch = self._backend.launch
        args.work, args.adjusts = 0, int((kinds.drawn or bool(args.masks)) and not kinds.penalized)
        if kinds.drawn or kinds.penalized or args.masks:
            args.work = self._work
        if kinds.penalized:
            launch("sample", "sample_adjust", (CHUNKS, n), 256, 0, args)
            launch("sample", "sample_penalize", (n,), 256, 0, args)
        launch("sample", "sample_scan", (CHUNKS, n), 256, 0, args)
        if is_last or kinds.drawn:
            launch("sample", "sample_pick", (n,), CHUNKS, 0, args)
        if kinds.summed:
            launch("sample", "sample_mass", (CHUNKS, n), 256, 0, args)
        if kinds.cut:
            launch("sample", "sample_gather", (CHUNKS, n), 256, 0, args)
        if kinds.drawn:
            launch("sample", "sample_floor", (n,), 1024, 0, args)
            launch("sample", "sample_noise", (CHUNKS, n), 256, 0, args)
            if is_last:
                launch("sample", "sample_take", (n,), CHUNKS, 0, args)

    # a chain of drafts

    def begin_drafts(self, rows: SamplingRows, limits: np.ndarray) -> None:
        n = len(rows.temperature)
        if n > self.max_rows or len(limits) != n or limits.min() < 1 or limits.max() > MAX_STEPS:
            raise Q27Error(f"drafts: {n} rows with limits {limits.tolist()}, expected at most {self.max_rows} of 1 to {MAX_STEPS}.")
        self._start_chain(n, replace(_kinds(rows), penalized=_penalizes(rows)))
        self._chain, self._chain_limits = self._inputs.put(rows, limits)

    def _start_chain(self, n: int, kinds: Kinds) -> None:
        self._rows, self._num_logprobs, self._step = n, np.full(n, -1, np.int32), 0
        self._chain_kinds, self._chain_rows = kinds, n

    def begin_ahead(self, rows: SamplingRows) -> Kinds:
        """A chain whose positions `follow` will set. rows: the same object again needs no copy."""
        if self._ahead[0] is not rows:
            limits = np.full(len(rows.temperature), MAX_STEPS, np.int32)
            self._ahead = (rows, *self._inputs_ahead.put(rows, limits))
        self._start_chain(len(rows.temperature), _kinds(rows))
        _, self._chain, self._chain_limits = self._ahead
        return self._chain_kinds

    def follow(self, area: BatchArea, target: BatchArea) -> None:
        """area: of the pass; target: of the chain."""
        args = cuda_args.Follow(self._out, self.accepted if self._accepted_valid else 0, area.at("positions"), area.at("row_starts"),
                                target.at("tokens"), target.at("positions"), self._chain.positions, self._chain_rows)
        self._backend.launch("draft", "follow", (1,), 64, 0, args)

    def take_drafts(self, batch: Batch) -> None:
        """Drafts of the last chain, and what the pass before drew, into the batch that was put into the area."""
        area = self._backend.area
        args = cuda_args.TakeDrafts(area.at("tokens"), self._out, area.at("row_starts"), self._drafts, batch.num_rows, batch.num_seqs, self._chain_rows)
        self._backend.launch("draft", "take_drafts", (1,), 64, 0, args)

    def draw_drafts(self, logits: CudaBuffer, skip: tuple[int, int], goes_on: bool) -> None:
        self._check(logits, self._rows)
        if self._step >= MAX_STEPS:
            raise Q27Error(f"a chain of more than {MAX_STEPS} drafts.")
        self._choose(self._chain, logits, self._chain_kinds, skip, not goes_on)
        area, chain, scratch = self._backend.area, self._chain, self._backend.scratch
        args = cuda_args.DraftNext(
            self._out, self._out + 4 * self.max_rows, self._chain_limits, area.at("tokens"), area.at("positions"),
            chain.positions, chain.penalty_starts, chain.penalty_ids, chain.penalty_counts, self._drafts,
            self._drafts + 4 * self._rows * MAX_STEPS, scratch.frequencies, scratch.rope, self._step, self._rows,
            self._backend.state.geometry.rotary_dim // 2)
        self._step += 1
        if goes_on:
            self._turn = cuda_args.DraftTurn(next=args, part_best=self._part_best, part_top=self._part_top)
        else:
            self._backend.launch("draft", "draft_next", (self._rows,), 256, 0, args)

    def take_turn(self) -> cuda_args.DraftTurn | None:
        """What is left of the last draft step, if anything is; it lacks the embedding."""
        turn, self._turn = self._turn, None
        return turn

    def drafted(self) -> Drafted:
        n, steps = self._chain_rows, self._step
        words = self._device.download(self._drafts, 8 * n * MAX_STEPS).view(np.int32)
        tokens, margins = words[:n * steps], words[n * MAX_STEPS:n * (MAX_STEPS + steps)].view(np.float32)
        return Drafted(tokens.reshape(steps, n).copy(), margins.reshape(steps, n).copy())

    def put_accepted(self, counts: np.ndarray) -> None:
        """Use these counts instead of those of `accept`."""
        self._counts_host[:len(counts)] = counts
        self._backend.send(self.accepted, self._counts_host[:len(counts)])

    def accept(self) -> None:
        backend, batch = self._backend, self._backend.batch
        if batch.phase != "verify":
            return
        args = cuda_args.Accept(self._out, backend.area.at("tokens"), backend.area.at("row_starts"), backend.area.at("logit_rows"),
                                self.accepted, batch.num_seqs, self._rows)
        backend.launch("accept", "accept", (1,), 256, 0, args)
        self._accepted_valid = True
        self._fetch()
        if self._is_fetched:   # the host goes on while what was accepted is folded into the states
            self._forget_sent()
            self._sent = (self._device.mark(), self._rows, batch.num_seqs, self._num_logprobs, True)

    def _forget_sent(self) -> None:
        """Nobody will wait for what was on its way."""
        if self._sent is not None and self._sent[0] is not None:
            self._device.forget(self._sent[0])
        self._sent = None

    def _fetch(self) -> None:
        """What was drawn and accepted, on its way to the host before anything else is done with it."""
        if not self._device.is_recording:
            self._backend.fetch(self._sent_host, self._out)
            self._is_fetched = True

    def start_download(self, num_seqs: int) -> None:
        """Of what was drawn and accepted; `result` waits for `end_download` and not for what comes after it."""
        if not self._is_fetched:
            self._fetch()
        self._forget_sent()
        self._sent = (None, self._rows, num_seqs, self._num_logprobs, self._accepted_valid)

    def end_download(self) -> None:
        """Uploads before this are known to have happened when the result has come."""
        assert self._sent is not None
        self._sent = (self._device.mark(), *self._sent[1:])

    def hold(self, num_seqs: int) -> None:
        """Download what was drawn for the next `result`, whatever is drawn meanwhile."""
        self._backend.fetch(self._held_host, self._out)
        self._held = (self._device.mark(), self._rows, num_seqs, self._num_logprobs, self._accepted_valid)

    def result(self, num_seqs: int) -> Sampled:
        most, (n, num_logprobs, accepted_valid) = self.max_rows, (self._rows, self._num_logprobs, self._accepted_valid)
        if self._held is not None:
            (event, n, num_seqs, num_logprobs, accepted_valid), self._held = self._held, None
            self._device.wait(event)
            words = self._held_host.view(np.int32)
        elif self._sent is not None:
            (event, n, num_seqs, num_logprobs, accepted_valid), self._sent = self._sent, None
            self._device.wait(event)
            words = self._sent_host.view(np.int32)
        else:
            words = self._device.download(self._out, 8 * most + 4 * self.max_seqs).view(np.int32)
        accepted = words[2 * most:2 * most + num_seqs].copy() if accepted_valid else np.ones(num_seqs, np.int32)
        tokens, margins = words[:n].copy(), words[most:most + n].view(np.float32).copy()
        logprobs: list = [None] * n
        if (num_logprobs >= 0).any():
            values = self._device.download(self._logprobs, n * 33 * 4).view(np.float32).reshape(n, 33)
            ids = self._device.download(self._logprob_ids, n * MAX_LOGPROBS * 4).view(np.int32).reshape(n, MAX_LOGPROBS)
            for row, count in enumerate(np.minimum(num_logprobs, MAX_LOGPROBS)):
                if count >= 0:
                    logprobs[row] = (float(values[row, 0]), ids[row, :count].copy(), values[row, 1:1 + count].copy())
        return Sampled(tokens, margins, accepted, logprobs)


def _kinds(rows: SamplingRows) -> Kinds:
    drawn = np.asarray(rows.temperature) > 0
    top_k, top_p = np.asarray(rows.top_k) > 0, (np.asarray(rows.top_p) > 0) & (np.asarray(rows.top_p) < 1)
    return Kinds(bool(drawn.any()), len(rows.penalty_ids) > 0, bool((drawn & (top_k | top_p)).any()), bool((drawn & top_p).any()))


def _penalizes(rows: SamplingRows) -> bool:
    """Whether what is drafted changes what may follow it."""
    return len(rows.penalty_ids) > 0 or bool(rows.presence.any() or rows.frequency.any())


def _with_places(rows: SamplingRows, steps: int) -> dict[str, tuple[np.ndarray, type]]:
    """The penalty lists, each with `steps` empty places at its end (id -1, count 0)."""
    ends = np.repeat(rows.penalty_starts[1:], steps)
    starts = rows.penalty_starts + steps * np.arange(len(rows.penalty_starts), dtype=np.int32)
    return {"penalty_starts": (starts, np.int32), "penalty_ids": (np.insert(rows.penalty_ids, ends, -1), np.int32),
            "penalty_counts": (np.insert(rows.penalty_counts, ends, 0), np.int32)}
