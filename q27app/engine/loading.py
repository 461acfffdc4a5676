"""Opens what an engine runs: backend, weights, the memory plan, slots and blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from q27app.engine.block_pool import BlockPool
from q27app.engine.cache_plan import CachePlan, fingerprint_of, open_cache, plan_cache
from q27app.engine.depth import PassPrices
from q27app.engine.draft_mtp import MIN_MARGIN, MtpDrafter
from q27app.engine.drafter import Drafter
from q27app.engine.phases import Phases
from q27app.engine.prefix_cache import PrefixCache
from q27app.engine.runner import RunsBatches
from q27app.engine.slot_pool import SlotPool
from q27app.engine.snapshot_cache import SnapshotCache
from q27app.engine.warm_up import WarmUp
from q27app.errors import OutOfMemory, Q27Error, UsageError
from q27app.kernels.backend import State
from q27app.kernels.batch import BLOCK_POSITIONS, MAX_DECODE_ROWS

if TYPE_CHECKING:
    from q27app.engine.drafts import Drafts
    from q27app.model.budget import MemoryPlan
    from q27app.model.config import ModelConfig
    from q27app.weights.container import Container

log = logging.getLogger("q27app.engine")

NUMPY_PREFILL_CHUNK = 256
GRAPH_BYTES = {"numpy": 0, "cuda": 7 << 18}
"""Device memory of a recorded pass."""
MAX_AUTO_SLOTS = 4
MAX_SHARED_SLOTS = {"numpy": 0, "cuda": MAX_DECODE_ROWS}
"""Most slots where their number is left to us; beyond MAX_AUTO_SLOTS they share the blocks of those."""
EXACT_KV_FORMAT = {"numpy": "fp32", "cuda": "fp16"}
STEPS_AT_ONCE = {"numpy": 1, "cuda": MAX_DECODE_ROWS - 1}
"""Draft steps that are queued before the host looks at what they drew."""
WARM_UP_S, WARM_UP_SHARE = 1.0, 0.25
"""How long, at most, a card runs and records the likeliest shapes before it is ready, and of the time that loading took; the others come
while nobody waits."""
ARRIVE_S = 1.0
"""How long it waits for the last states from disk."""
DRAFT_MODES = ("auto", "off", "mtp", "suffix")
EMBED_PLACES = ("auto", "device", "host")
MAX_PREFILL_CHUNK = 65_536

Progress = Callable[[float], None]
"""Called now and then with the share that is done, 0 to 1. What it raises ends the loading."""


@dataclass(frozen=True)
class EngineConfig:
    """model: path of a .q27. The others are wishes."""

    model: str | Path = ""
    backend: str = "auto"
    """"numpy", "cuda"; auto: CUDA if there is an NVIDIA device, else NumPy."""
    gpu: str = "auto"
    """Which card: UUID, PCI address, index or part of a name; auto: the one with the most memory."""
    context: int | None = None
    """Window of a request, tokens; None = as much as fits, at most what the model was trained for."""
    slots: int | None = None
    """Requests that run at once, each with room for a whole window; None = as many as fit so, at most 4, and on CUDA more, at most
    16, that share that room."""
    kv_format: str = "auto"
    """How keys and values are kept; auto: fp32 on NumPy, on CUDA the most exact that holds the window; exact: fp32, fp16."""
    embed: str = "auto"
    """Where the embedding table lies: "device", "host" (page-locked, read in place), auto: in host memory where that buys window.
    One that is the head as well stays on the device; NumPy knows no difference."""
    fast_head: bool = False
    """In a tier with two heads the smaller one decides, not only for drafts: quicker, and another text now and then."""
    max_queue: int = 64
    """Requests that may wait beyond those that run."""
    prefill_chunk: int | None = None
    """Prompt tokens of one pass, a multiple of 64; None = 256 on NumPy, 1,024 on CUDA."""
    draft: str = "auto"
    """Where drafts come from: "mtp" (the draft layer), "suffix" (repeats of the text), "auto" = both as far as the model has
    them, "off". Never changes a text."""
    max_draft: int = 15
    """Most drafts of a sequence in one pass, 1 to 15; how many of them are worth their price is measured."""
    light_drafts: bool = True
    """On a card, where the main layers are Q4, the draft layer is too: quicker drafts, a few less of them right."""
    common_ids: int | None = None
    """Most drafts are among so many first ids of the vocabulary and its last 512; 0 = among all, always; None = 98,304."""
    warm_up: bool = False
    """Run, record and time every usual shape of a pass before the first request; else a card begins with the likeliest and does the
    others while nobody waits."""
    fixed_draft: bool = False
    """Always draft max_draft tokens (tests, measurements)."""
    cache: bool = True
    """Keep states of prefixes, so that no prompt's beginning is computed twice."""
    cache_host_bytes: int | None = None
    """Most host memory of kept states; None = a quarter of what is free, at most 16 GiB."""
    cache_device_slots: int | None = None
    """States kept on the device beside those of requests; None = up to 64 on CUDA as far as a quarter of what is left holds them, none on NumPy."""
    cache_dir: str | Path | None = None
    """Folder where states survive the process; None = none."""
    cache_disk_bytes: int = 20 << 30
    """Most bytes of that folder's entries."""
    verify_weights: bool = False
    """Compute a checksum of every weight as it lies in memory once all are loaded; `Engine.verify` compares."""
    nvcc: str | None = None
    """The CUDA compiler; None = looked for."""
    checks_pools: bool = False
    """Verify after every step that slots and blocks are held by exactly those who should (tests)."""


class Plan(Protocol):
    """What the engine needs of `model.budget.MemoryPlan`."""

    num_slots: int
    max_context: int

    def to_dict(self) -> dict[str, Any]: ...


@dataclass
class Loaded:
    """A model that is ready to run, and everything that belongs to it. close(): gives all memory back."""

    model: RunsBatches
    state: State
    plan: Plan
    slots: SlotPool
    blocks: BlockPool
    vocab_size: int
    prefill_chunk: int
    drafter: Drafter | None = None
    prefix_cache: PrefixCache | None = None
    warm_up: WarmUp | None = None
    """What is still to be run once while nobody waits."""
    info: dict[str, Any] = field(default_factory=dict)
    checksums: tuple[tuple[str, int], ...] = ()
    """(names, checksum) of each weight when it had been loaded; () unless asked for."""
    close: Callable[[], None] = lambda: None


OpenModel = Callable[[EngineConfig, Progress], Loaded]


def check_config(config: EngineConfig) -> None:
    """Raises UsageError for a value that cannot be used."""
    chunk = config.prefill_chunk
    if chunk is not None and not (0 < chunk <= MAX_PREFILL_CHUNK and chunk % BLOCK_POSITIONS == 0):
        raise UsageError(f"prefill_chunk is {chunk}, expected a multiple of {BLOCK_POSITIONS} up to {MAX_PREFILL_CHUNK}.")
    if config.draft not in DRAFT_MODES:
        raise UsageError(f"draft is {config.draft!r}, expected one of {', '.join(DRAFT_MODES)}.")
    if not 1 <= config.max_draft < MAX_DECODE_ROWS:
        raise UsageError(f"max_draft is {config.max_draft}, expected 1 to {MAX_DECODE_ROWS - 1}.")
    if min(config.cache_host_bytes or 0, config.cache_device_slots or 0, config.cache_disk_bytes) < 0:
        raise UsageError("sizes of the prefix cache are negative, expected 0 or more.")
    if config.embed not in EMBED_PLACES:
        raise UsageError(f"embed is {config.embed!r}, expected one of {', '.join(EMBED_PLACES)}.")
    if config.max_queue < 0:
        raise UsageError(f"max_queue is {config.max_queue}, expected 0 or more.")


def loading_error(problem: Exception) -> Q27Error:
    """Why a model could not be loaded; the log has the rest."""
    if isinstance(problem, Q27Error):
        log.error("the model could not be loaded: %s", problem)
        return problem
    log.error("the model could not be loaded", exc_info=problem)
    if isinstance(problem, MemoryError):
        return OutOfMemory(f"host memory does not hold the model: {str(problem) or 'the system gives no more'}.",
                           "Close other programs, or choose a smaller context or tier.")
    return Q27Error(f"the model could not be loaded: {type(problem).__name__}: {problem}"[:500], "The log has the details.")


def open_model(config: EngineConfig, progress: Progress) -> Loaded:
    """Read the file, refuse what does not fit before loading it, load it, allocate slots and blocks. Raises Q27Error."""
    from q27app.kernels import open_backend
    from q27app.model.config import ModelConfig
    from q27app.weights.container import open_container

    phases = Phases()
    backend = open_backend(config.backend, config.nvcc, config.gpu)
    phases.end("backend")
    try:
        with open_container(config.model) as file:
            shapes = {name: tuple(tensor.shape) for name, tensor in file.tensors.items()}
            geometry = ModelConfig.from_metadata(file.metadata, shapes)
            with _light(config, backend.name, file, geometry) as container:
                return _load(config, backend, container, geometry, progress, phases)
    except BaseException:
        backend.close()
        raise


def auto_chunk(backend: str, free: int) -> int:
    """Rows of a prefill pass where nobody says. free: bytes of the device before anything is loaded."""
    from q27app.model.budget import card_prefill_rows

    return card_prefill_rows(free) if backend == "cuda" else NUMPY_PREFILL_CHUNK


def _load(
    config: EngineConfig, backend: Any, container: Container, geometry: ModelConfig, progress: Progress, phases: Phases
) -> Loaded:
    from q27app.model.budget import MAX_CONTEXT, place_embedding, with_shared_slots
    from q27app.model.forward import load_model
    from q27app.model.replays import most_recorded
    from q27app.model.weights import weight_bytes

    free = backend.free_bytes()
    chunk = config.prefill_chunk or auto_chunk(backend.name, free)
    max_rows = max(chunk, MAX_DECODE_ROWS)
    movable = 0 if backend.name == "numpy" or geometry.tied else container.tensors["token_embd.weight"].nbytes
    before, in_host = place_embedding(lambda weights: _plan(config, backend, geometry, free, weights, max_rows),
                                      weight_bytes(backend, geometry, container, False, config.fast_head), movable, config.embed,
                                      config.context or geometry.max_context)
    model = load_model(backend, container, max_rows, BLOCK_POSITIONS,
                       lambda done, total: progress(done / max(1, total)), in_host, config.fast_head, config.common_ids)
    weights, buffers = backend.taken_bytes()
    phases.end("weights")

    def scratch(num_blocks: int) -> int:
        return buffers + backend.scratch_bytes(geometry, geometry.num_delta_layers, num_blocks, MAX_DECODE_ROWS)

    plan = _plan(config, backend, geometry, free, weights, max_rows, scratch(MAX_CONTEXT // BLOCK_POSITIONS))
    if in_host:
        plan = replace(plan, reasons=[*plan.reasons, *(text for text in before.reasons if text.startswith("embedding: "))])
    if config.slots is None:
        plan = with_shared_slots(plan, MAX_SHARED_SLOTS[backend.name])
    plan, cache_plan = _with_cache(config, plan, backend.name)
    plan = replace(plan, scratch=scratch(plan.num_blocks))
    model.replays.limit = most_recorded(plan.num_slots)
    state = model.allocate_state(plan.kv_format, plan.num_slots + cache_plan.num_slots, plan.num_blocks, MAX_DECODE_ROWS)
    phases.end("kernels and state")
    blocks, slots, drafter = BlockPool(plan.num_blocks), SlotPool(plan.num_slots), _drafter(config, model, state, geometry)
    cache = _cache(config, cache_plan, container, model, state, plan, blocks, drafter) if config.cache else None
    warm_up = _warm_up(model, state, slots, blocks, drafter, plan.max_context)
    phases.end("cache")
    checksums = _make_ready(config, model, warm_up, cache, phases)

    def close() -> None:
        with closing(backend):
            if cache is not None:
                cache.close()

    return Loaded(
        model=model,
        state=state,
        plan=plan,
        slots=slots,
        blocks=blocks,
        vocab_size=geometry.vocab_size,
        prefill_chunk=chunk,
        drafter=drafter,
        prefix_cache=cache,
        warm_up=warm_up if backend.is_ahead else None,
        info=_info(config, backend.name, container, geometry, plan) | {"start": str(phases)},
        checksums=checksums,
        close=close,
    )


def _make_ready(config: EngineConfig, model: Any, warm_up: WarmUp, cache: SnapshotCache | None, phases: Phases) -> tuple[tuple[str, int], ...]:
    """The likeliest shapes are run and recorded, while the last states are read from disk; then those get their places. Returns the
    weights' checksums."""
    loading_s = phases.total - phases.seconds["backend"]
    until = time.monotonic() + (min(WARM_UP_S, loading_s * WARM_UP_SHARE) if model.backend.is_ahead else 0.0)
    while warm_up.has_work and (config.warm_up or time.monotonic() < until):
        warm_up.step()
    phases.end("warm-up")
    if cache is not None:
        cache.arrive(ARRIVE_S)
    phases.end("states from disk")
    checksums = tuple(model.backend.checksums()) if config.verify_weights else ()
    phases.end("checksums")
    shapes = (f"; of the usual shapes of passes {warm_up.num_run} were run and {len(model.replays)} recorded, {warm_up.num_left} are left"
              if model.backend.is_ahead or warm_up.num_run else "")
    log.info("the engine is ready after %s%s", phases, shapes)
    return checksums


def _with_cache(config: EngineConfig, plan: MemoryPlan, backend_name: str) -> tuple[MemoryPlan, CachePlan]:
    if not config.cache:
        return plan, CachePlan()
    cache = plan_cache(plan, backend_name, config.cache_host_bytes, config.cache_device_slots)
    reason = (f"prefix cache: {cache.num_blocks} of the blocks, {cache.num_slots} states on the device, "
              f"{cache.host_bytes / 1e9:.1f} GB of host memory")
    plan = replace(plan, num_blocks=plan.num_blocks + cache.num_blocks, num_kept_slots=cache.num_slots, reasons=[*plan.reasons, reason])
    return plan, cache


def _light(config: EngineConfig, backend: str, container: Container, geometry: ModelConfig) -> Container:
    """The container as it is loaded. NumPy computes in float32 and would gain nothing."""
    from q27app.weights.light import with_light_drafts

    if not config.light_drafts or backend == "numpy" or not geometry.num_mtp_layers or config.draft not in ("auto", "mtp"):
        return container
    return with_light_drafts(container, geometry.num_layers)


def _cache(
    config: EngineConfig, cache_plan: CachePlan, container: Container, model: Any, state: State, plan: MemoryPlan,
    blocks: BlockPool, drafter: Drafter | None,
) -> SnapshotCache:
    fingerprint = b""
    if config.cache_dir:
        warms_mtp = drafter is not None and drafter.needs_mtp
        fingerprint = fingerprint_of(container, model.backend, state, plan.kv_format, warms_mtp)
    slots = range(plan.num_slots, plan.num_slots + cache_plan.num_slots)
    return open_cache(cache_plan, state, blocks, slots, config.cache_dir, config.cache_disk_bytes, fingerprint)


def _warm_up(model: Any, state: State, slots: SlotPool, blocks: BlockPool, drafter: Drafts | None, window: int) -> WarmUp:
    if drafter is None:
        return WarmUp(model, state, slots, blocks, 0, False, PassPrices(), window)
    return WarmUp(model, state, slots, blocks, drafter.cap, drafter.needs_mtp, drafter.prices, window)


def _drafter(config: EngineConfig, model: Any, state: State, geometry: ModelConfig) -> Drafts | None:
    from q27app.engine.drafts import Drafts

    if config.draft == "off":
        return None
    if config.draft == "mtp" and not model.has_mtp:
        raise UsageError(f"draft is mtp, but {geometry.name} has no draft layer.", "Use auto, suffix or off.")
    prices, mtp = PassPrices(), None
    if model.has_mtp and config.draft in ("auto", "mtp"):
        mtp = MtpDrafter(model, state, geometry.vocab_size, 0.0 if config.fixed_draft else MIN_MARGIN,
                         STEPS_AT_ONCE[model.backend.name], lambda ms, is_narrow: drafts.step_took(ms, is_narrow))
    drafts = Drafts(mtp, config.draft != "mtp", config.max_draft, prices, config.fixed_draft, model.backend.is_ahead)
    return drafts


def _plan(config: EngineConfig, backend: Any, geometry: ModelConfig, free: int, weights: int, max_rows: int,
          scratch: int | None = None) -> MemoryPlan:
    """scratch: bytes of it, None = estimated."""
    from q27app.model.budget import automatic_kv_formats, card_scratch_bytes, plan_memory, plan_with_best_format, scratch_bytes
    from q27app.model.replays import most_recorded

    estimate = scratch_bytes if backend.name == "numpy" else card_scratch_bytes
    sizes = {
        "free": free, "weights": weights, "graphs": GRAPH_BYTES[backend.name] * most_recorded(config.slots or max(MAX_AUTO_SLOTS, MAX_SHARED_SLOTS[backend.name])),
        "scratch": estimate(geometry, max_rows, BLOCK_POSITIONS) if scratch is None else scratch, "margin": free // 16,
        "context": config.context, "slots": config.slots, "max_auto_slots": MAX_AUTO_SLOTS,
        "window_rows": None if backend.name == "numpy" else geometry.conv_width, "runtime": backend.runtime_bytes,
        "lacking_rows": backend.lacking_rows,
    }
    if config.kv_format != "auto":
        wanted = EXACT_KV_FORMAT[backend.name] if config.kv_format == "exact" else config.kv_format
        return plan_memory(geometry, kv_format=wanted, **sizes)
    card = getattr(getattr(backend, "device", None), "card", None)
    formats = automatic_kv_formats(card.capability if card else None, geometry.head_dim)
    return plan_with_best_format(geometry, formats, **sizes)


def _info(
    config: EngineConfig, backend_name: str, container: Container, geometry: ModelConfig, plan: MemoryPlan
) -> dict[str, Any]:
    """Who is served, for /status. Values are short texts and numbers."""
    metadata = container.metadata
    return {
        "name": geometry.name,
        "file": Path(config.model).name,
        "backend": backend_name,
        "tier": str(metadata.get("q27app.tier", metadata.get("quant_policy", "")))[:100],
        "generation": str(metadata.get("q27app.generation", ""))[:20],
        "kv_format": plan.kv_format,
        "num_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "vocab_size": geometry.vocab_size,
        "num_mtp_layers": geometry.num_mtp_layers,
    }
