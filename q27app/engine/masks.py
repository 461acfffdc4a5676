"""Which ids a guide allows at the rows of a pass."""

from __future__ import annotations

import logging

import numpy as np

from q27app.engine.request import Guide
from q27app.errors import Q27Error

log = logging.getLogger("q27app.engine")


def masks_for(guide: Guide | None, drafts: list[int], vocab_size: int) -> list[np.ndarray | None] | None:
    """A mask (uint32 [ceil(vocab / 32)], None = all) for the row before the drafts and for each draft's row.

    Shortens `drafts` in place at the first one that its mask forbids: it could not be drawn. None if nothing is
    constrained. Raises Q27Error if the guide fails or allows nothing.
    """
    if guide is None:
        return None
    masks: list[np.ndarray | None] = []
    for index in range(len(drafts) + 1):
        mask = mask_after(guide, drafts[:index], vocab_size)
        if mask is not None and not _any_allowed(mask, vocab_size):
            if index == 0:
                raise Q27Error("the request's grammar allows no token here.")
            del drafts[index - 1:]
            break
        masks.append(mask)
        if mask is not None and index < len(drafts) and not mask[drafts[index] // 32] >> (drafts[index] % 32) & 1:
            del drafts[index:]
            break
    return masks if any(mask is not None for mask in masks) else None


def mask_after(guide: Guide | None, prefix: list[int], vocab_size: int) -> np.ndarray | None:
    """What a guide allows after `prefix`; None = all. Raises Q27Error if it fails."""
    if guide is None:
        return None
    try:
        mask = guide.mask(prefix)
    except Exception as error:  # a guide is foreign code: its mistakes end its own request
        log.exception("a guide's mask failed")
        raise Q27Error(f"the request's guide failed: {error!r:.200}.") from error
    if mask is not None and (mask.dtype != np.uint32 or mask.shape != (-(-vocab_size // 32),)):
        raise Q27Error(f"the request's guide gave a mask {mask.dtype} {list(mask.shape)}, expected uint32 "
                       f"[{-(-vocab_size // 32)}].")
    return mask


def _any_allowed(mask: np.ndarray, vocab_size: int) -> bool:
    """Bits past the vocabulary do not count."""
    last = vocab_size % 32
    return bool(mask.any() if not last else mask[:-1].any() or mask[-1] & np.uint32((1 << last) - 1))
