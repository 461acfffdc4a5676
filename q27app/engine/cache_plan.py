"""What the prefix cache gets of a machine: device slots and KV blocks beyond those that requests need, host memory, a
folder. Pure arithmetic but for `fingerprint_of`, which reads samples of the weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from q27app.engine.block_pool import BlockPool, blocks_of
from q27app.engine.disk_cache import MAX_EARLY_BYTES, DiskCache
from q27app.engine.host_cache import HostCache
from q27app.engine.snapshot_cache import SnapshotCache
from q27app.kernels.backend import State

if TYPE_CHECKING:
    from q27app.model.budget import MemoryPlan
    from q27app.weights.container import Container, Tensor

MAX_HOST_BYTES = 16 << 30
MAX_DEVICE_SLOTS = {"numpy": 0, "cuda": 64}
LEAVES_DEVICE = ("cuda",)
"""Backends whose blocks lie elsewhere than in host memory."""
LAYOUT_VERSION = 2
"""Grows when the meaning of a slot's or block's bytes, or the bits that prefill computes, change."""
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class CachePlan:
    """num_slots, num_blocks: beside those that requests need, on the device. host_bytes: for recurrent state whose blocks are on
    the device; whole_bytes: for states that have left it with their blocks."""

    num_slots: int = 0
    num_blocks: int = 0
    host_bytes: int = 0
    whole_bytes: int = 0


def plan_cache(plan: MemoryPlan, backend_name: str, host_bytes: int | None, device_slots: int | None) -> CachePlan:
    """Blocks of one more window, and slots, from at most half of what the memory plan leaves. None = auto."""
    room = max(0, plan.free - plan.margin - plan.used) // 2
    wanted = MAX_DEVICE_SLOTS.get(backend_name, 0) if device_slots is None else device_slots
    num_slots = min(wanted, room // 2 // max(1, plan.slot_bytes))
    room -= num_slots * plan.slot_bytes
    num_blocks = min(blocks_of(plan.max_context), room // max(1, plan.block_bytes))
    if host_bytes is None:
        host_bytes = min(MAX_HOST_BYTES, _available_bytes() // 4)
    whole_bytes = host_bytes // 2 if backend_name in LEAVES_DEVICE else 0
    return CachePlan(num_slots, num_blocks, host_bytes - whole_bytes, whole_bytes)


def _available_bytes() -> int:
    """Free memory of this machine, about; 4 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 4 << 30


def open_cache(
    plan: CachePlan, state: State, blocks: BlockPool, device_slots: Seq[int], folder: str | Path | None = None,
    disk_bytes: int = 0, fingerprint: bytes = b"",
) -> SnapshotCache:
    """The prefix cache of a loaded model. device_slots: the state's slots that no request takes."""
    early_bytes = min(MAX_EARLY_BYTES, _available_bytes() // 8)
    disk = DiskCache(Path(folder).expanduser(), fingerprint, disk_bytes, early_bytes=early_bytes) if folder else None
    host = HostCache(plan.whole_bytes) if plan.whole_bytes else None
    return SnapshotCache(state, blocks, device_slots, plan.host_bytes, disk, host=host)


def fingerprint_of(container: Container, backend: Any, state: State, kv_format: str, warms_mtp: bool) -> bytes:
    """32 bytes that differ whenever a state computed there is of no use here.

    Names, formats and shapes of all tensors and samples of their bytes stand for the weights, wherever the file lies.
    """
    digest = hashlib.blake2b(digest_size=32)
    card = getattr(getattr(backend, "device", None), "card", None)
    what = (LAYOUT_VERSION, backend.name, str(getattr(card, "capability", "")), np.__version__, kv_format, warms_mtp,
            state.slot_bytes, state.block_bytes)
    digest.update(repr(what).encode())
    for key in sorted(container.metadata):
        if key.startswith("qwen35."):
            digest.update(f"{key}={container.metadata[key]!r};".encode())
    for name in sorted(container.tensors):
        _add_tensor(digest, container.tensors[name])
    return digest.digest()


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tensor.name} {tensor.dtype.name} {tuple(tensor.shape)};".encode())
    for array in (tensor.data, tensor.scales):
        if array is not None:
            flat = array.reshape(-1).view(np.uint8)
            for start in (0, len(flat) // 2, max(0, len(flat) - SAMPLE_BYTES)):
                digest.update(flat[start:start + SAMPLE_BYTES].tobytes())
