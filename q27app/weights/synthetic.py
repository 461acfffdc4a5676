"""Constructed checkpoints of any size, 27B included, whose behaviour is known before they run.

chain: the greedy successor of token t is t + 1, wrapping. The embedding row E[t] holds random codes c[t]; the head's
row t + 1 is the same codes, so the logit of t + 1 stands far above all others. Everything that writes to the residual
stream is random and so small that it cannot change that. Codes are -7 .. 7 and the scales of E and head are powers of
two (times 18 at Q4), so the values are the same in every tier.

The draft layer reads E[t] through the embedding half of eh_proj (the identity; the hidden half is zero, so drafting
from its own output changes nothing) and hands it to the same head. To be wrong for chosen tokens, the last two
columns of E are markers that the head ignores: column -1 is 7 in every row, column -2 is 7 where drafts are right and
-7 where they are wrong. In eh_proj they carry +8 D and -8 D, D being the head's row of token DECOY: for a right token
they cancel exactly, for a wrong one they add four times D to a stream of E[t], and the draft is DECOY. Which tokens
are right is `right_tokens`.

A chain proves plumbing, length and speed; its text does not depend on state, so it proves no kernel, KV format or
rollback.

dense: random weights at natural scale, where every error shows in the logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from q27app.errors import UsageError
from q27app.weights.codecs import encode
from q27app.weights.convert import Progress, draft_block, generation_of, tier_metadata
from q27app.weights.dtypes import F16, F32, Q4_G64, Q8_G128, DType, scales_per_row
from q27app.weights.names import Geometry, all_rules
from q27app.weights.synthetic_pool import CHUNK_BYTES, Pool, Rows, Stream, chunk_rows, packed
from q27app.weights.synthetic_sizes import parse_size, size_metadata, tokenizer_keys
from q27app.weights.tiers import DRAFT_HEAD, EMBEDDING, HEAD, tier_entries
from q27app.weights.writer import TensorEntry, Writer

WIRINGS = ("chain", "dense")
DECOY = 0
"""What the draft layer says where it is wrong."""

Q4_PER_Q8 = 18
"""Codes of E and head at Q8 are 18 times those at Q4 (7 * 18 = 126), scales a power of two."""

EMBEDDING_STEP = 2.0**-2
"""Q8 scale of E: its rms is about 19."""

PEAK_LOGIT = 32.0
"""The successor's logit is between this and its double."""

MARKER, EYE, DECOY_CODE = 7, 28, 8
STRAY = 0.02
"""rms of all that a layer stack adds to the residual stream, over the rms of E."""

WRITERS = ("attn_output.weight", "ssm_out.weight", "ffn_down.weight")
EXACT_NORMS = ("output_norm.weight", "nextn.enorm.weight", "nextn.shared_head_norm.weight")


class _Maker(Protocol):
    def rows(self, start: int, stop: int) -> Rows: ...


def synthesize(
    destination: str | os.PathLike[str], size: str = "nano", wiring: str = "chain", tier: str = "q4s",
    accept: float = 0.8, seed: int = 0, progress: Progress | None = None, overwrite: bool = False,
) -> Path:
    """Write a constructed `.q27`.

    size: nano, 27b or WxL (see `synthetic_sizes`). accept: share of tokens whose draft is right.
    progress(bytes written, bytes in all, tensor). Raises UsageError for arguments, FileFormatError where a tier
    cannot hold the size, Q27Error for the disk.
    """
    if wiring not in WIRINGS:
        raise UsageError(f"there is no wiring {wiring!r}; expected chain or dense.")
    if not 0.0 <= accept <= 1.0:
        raise UsageError(f"accept is {accept}, expected a share from 0 to 1.")
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"seed is {seed}, expected a number from 0 to 2^63 - 1.")
    geometry_size = parse_size(size)
    metadata = size_metadata(geometry_size, f"q27app {wiring} {geometry_size.name}")
    metadata["q27app.synthetic"] = {"size": geometry_size.name, "wiring": wiring, "accept": accept, "seed": seed,
                                    "decoy": DECOY}
    metadata |= tokenizer_keys(geometry_size.vocab)
    geometry = Geometry(metadata)
    recurrent = metadata["qwen35.attention.recurrent_layers"]
    shapes = {name: geometry.shape(rule.shape) for _, name, rule in all_rules(geometry, recurrent, tied=False)}
    generation = generation_of(metadata["general.name"])
    plan = tier_entries(tier, generation, shapes, draft_block(metadata))
    shapes[DRAFT_HEAD] = shapes[HEAD]
    entries = [TensorEntry(name, dtype, shapes[name]) for name, dtype in plan.dtypes.items()]
    metadata |= tier_metadata(plan, generation, metadata)
    builder = _Builder(Pool(seed), geometry, wiring, right_tokens(geometry_size.vocab, accept, seed))
    with Writer(destination, metadata, entries, overwrite) as writer:
        _write(writer, entries, builder, progress)
    return Path(destination)


def right_tokens(vocab: int, accept: float, seed: int = 0) -> np.ndarray:
    """bool [vocab]: tokens whose draft (the guess of the token after them) is right in a chain.

    Those with splitmix64(token, seed) < accept.

    The token before DECOY is right whatever the hash says, since the decoy is its successor.
    """
    with np.errstate(over="ignore"):
        mixed = np.arange(vocab, dtype=np.uint64) + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
        mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    right = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < accept
    right[DECOY - 1] = True
    return right


def _write(writer: Writer, entries: list[TensorEntry], builder: "_Builder", progress: Progress | None) -> None:
    done, total = 0, sum(entry.data_bytes + entry.scale_bytes for entry in entries)
    for entry in entries:
        maker = builder.maker(entry)
        for start, stop in _ranges(entry):
            data, scales = maker.rows(start, stop)
            writer.write(entry.name, data, scales)
            done += data.nbytes + (scales.nbytes if scales is not None else 0)
            if progress is not None:
                progress(done, total, entry.name)


def _ranges(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    step = chunk_rows(entry.dtype, entry.cols)
    for start in range(0, entry.rows, step):
        yield start, min(start + step, entry.rows)


class _Builder:
    """Chooses how each tensor is made; owns the pool and the chain's code streams."""

    def __init__(self, pool: Pool, geometry: Geometry, wiring: str, right: np.ndarray) -> None:
        self.pool, self.geometry, self.is_chain = pool, geometry, wiring == "chain"
        self.hidden, self.vocab = geometry.sizes["H"], geometry.sizes["V"]
        self.right = right
        self.draft = f"blk.{geometry.num_layers}." if geometry.num_mtp else None
        self.code_rms = float(np.sqrt(np.mean(pool.nibbles.astype(np.float64) ** 2)))
        head_rms = Q4_PER_Q8 * self.code_rms * self.hidden
        self.head_step = 2.0 ** np.ceil(np.log2(PEAK_LOGIT / head_rms))

    def maker(self, entry: TensorEntry) -> _Maker:
        short = entry.name.split(".", 2)[2] if entry.name.startswith("blk.") else entry.name
        if self.is_chain and entry.name in (EMBEDDING, HEAD, DRAFT_HEAD):
            return _ChainRows(self, entry)
        if self.is_chain and short == "nextn.eh_proj.weight":
            return _DraftInput(self, entry)
        if entry.dtype is F32 and (len(entry.shape) == 1 or short == "ssm_conv1d.weight"):
            return _Values(self._small(entry, short))
        return self.pool.tensor(entry, self._std(entry, short))

    def _std(self, entry: TensorEntry, short: str) -> float:
        """Natural scale, 1 / sqrt(inputs); writers of a chain far below it."""
        natural = entry.cols**-0.5
        if entry.name == EMBEDDING:
            return 1.0
        if entry.name in (HEAD, DRAFT_HEAD):
            return 2 * natural
        if not self.is_chain or short not in WRITERS:
            return natural
        if self.draft is not None and entry.name.startswith(self.draft):
            return natural * EYE * STRAY / 2**0.5
        stream_rms = EMBEDDING_STEP * Q4_PER_Q8 * self.code_rms
        return natural * stream_rms * STRAY / (2 * self.geometry.num_layers) ** 0.5

    def _small(self, entry: TensorEntry, short: str) -> np.ndarray:
        """float32 [rows, cols] of a norm, a decay, a time step or a convolution."""
        random, shape = self.pool.random_for(entry.name), (entry.rows, entry.cols)
        if short == "ssm_a":
            return -random.uniform(0.5, 8.0, shape).astype(np.float32)
        if short == "ssm_dt.bias":
            return np.log(np.expm1(np.exp(random.uniform(np.log(0.002), np.log(0.2), shape)))).astype(np.float32)
        if short == "ssm_conv1d.weight":
            return (0.5 * random.standard_normal(shape)).astype(np.float32)
        if self.is_chain and short in EXACT_NORMS:
            return np.ones(shape, np.float32)
        return (1.0 + 0.2 * random.standard_normal(shape)).astype(np.float32)

    def codes(self, token: int) -> np.ndarray:
        """int8 [hidden], -7 .. 7: the head's row for the successor of `token`; E[token] but for its markers."""
        places = (token % self.vocab * self.hidden + np.arange(self.hidden)) % len(self.pool.nibbles)
        codes = self.pool.nibbles[places].copy()
        codes[-2:] = 0
        return codes


class _Values:
    """A small float32 tensor that is there as a whole."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def rows(self, start: int, stop: int) -> Rows:
        return np.ascontiguousarray(self.values[start:stop]).view(np.uint8), None


class _ChainRows:
    """E, or a head: row t of E is c[t] with markers, row t of a head is c[t - 1] with zeros in the markers' places."""

    def __init__(self, builder: _Builder, entry: TensorEntry) -> None:
        self.builder, self.entry = builder, entry
        self.is_head = entry.name != EMBEDDING
        codes, step = builder.pool.nibbles, builder.head_step if self.is_head else EMBEDDING_STEP
        self.dtype: DType = entry.dtype
        self.unit = 1.0 if entry.dtype in (Q4_G64, Q8_G128) else step
        periods: dict[DType, Callable[[], np.ndarray]] = {
            Q4_G64: lambda: packed(codes),
            Q8_G128: lambda: codes * np.int8(Q4_PER_Q8),
            F16: lambda: (codes * np.float32(Q4_PER_Q8 * step)).astype(np.float16),
            F32: lambda: codes * np.float32(Q4_PER_Q8 * step),
        }
        self.stream = Stream(periods[entry.dtype](), min(CHUNK_BYTES, entry.data_bytes))
        self.scale = np.float16(step * Q4_PER_Q8 if entry.dtype is Q4_G64 else step)
        self.width = entry.data_bytes // entry.rows
        self.groups = scales_per_row(entry.dtype, entry.cols)

    def rows(self, start: int, stop: int) -> Rows:
        builder, shift = self.builder, 1 if self.is_head else 0
        data = self.stream.rows((start - shift) * self.width, stop - start, self.width).copy()
        if self.is_head and start == 0:
            last = (builder.vocab - 1) * self.width % self.stream.period
            data[0] = self.stream.tile[last:last + self.width]
        self._mark(data, np.arange(start, stop))
        if not self.groups:
            return data, None
        return data, np.full((stop - start, self.groups), self.scale, np.float16)

    def _mark(self, data: np.ndarray, tokens: np.ndarray) -> None:
        """Overwrite the last two columns."""
        if self.is_head:
            markers = np.zeros((len(tokens), 2), np.int8)
        else:
            side = np.where(self.builder.right[tokens], MARKER, -MARKER)
            markers = np.stack([side, np.full(len(tokens), MARKER)], axis=1).astype(np.int8)
        if self.dtype is Q4_G64:
            data[:, -1] = (markers[:, 0] + 8) | (markers[:, 1] + 8) << 4
        elif self.dtype is Q8_G128:
            data[:, -2:] = (markers * np.int8(Q4_PER_Q8)).view(np.uint8)
        else:
            float_type = np.float16 if self.dtype is F16 else np.float32
            values = (markers * np.float32(Q4_PER_Q8 * self.unit)).astype(float_type)
            data[:, -values[0].nbytes:] = values.view(np.uint8)


class _DraftInput:
    """eh_proj [hidden, 2 hidden]: EYE on the embedding half's diagonal, the decoy in the markers' columns."""

    def __init__(self, builder: _Builder, entry: TensorEntry) -> None:
        self.entry, self.hidden = entry, builder.hidden
        self.decoy = builder.codes(DECOY - 1).astype(np.int8) * np.int8(DECOY_CODE)

    def rows(self, start: int, stop: int) -> Rows:
        codes = np.zeros((stop - start, 2 * self.hidden), np.int8)
        codes[np.arange(stop - start), np.arange(start, stop)] = EYE
        codes[:, self.hidden - 2] -= self.decoy[start:stop]
        codes[:, self.hidden - 1] += self.decoy[start:stop]
        if self.entry.dtype is Q8_G128:
            return codes.view(np.uint8), np.ones((stop - start, scales_per_row(Q8_G128, 2 * self.hidden)), np.float16)
        return encode(codes.astype(np.float32), self.entry.dtype, self.entry.name)


def describe(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """size, wiring, accept, seed and decoy of a constructed checkpoint; None for any other."""
    found = metadata.get("q27app.synthetic")
    return found if isinstance(found, dict) and found.get("wiring") in WIRINGS else None
