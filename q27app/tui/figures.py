"""Numbers as a person reads them, in a width that doesn't jump. None is a dash."""

from __future__ import annotations

DASH = "-"


def thousands(value: float | None) -> str:
    """12,345"""
    return DASH if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """950, 12.3k, 131k, 2.10M"""
    if value is None:
        return DASH
    if value < 1000:
        return f"{value:.0f}"
    if value < 999_500:
        return f"{value / 1e3:.1f}k" if value < 99_950 else f"{value / 1e3:.0f}k"
    return f"{value / 1e6:.2f}M"


def gigabytes(value: float | None) -> str:
    """0.02, 3.1, 17.2: bytes in GB"""
    if value is None:
        return DASH
    return f"{value / 1e9:.2f}" if value < 1e9 else f"{value / 1e9:.1f}"


def rate(value: float | None) -> str:
    """Tokens a second: 0, 8.4, 182, 2,110"""
    if value is None:
        return DASH
    return f"{value:.1f}" if 0 < value < 100 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """37%; 100% only where nothing is missing"""
    return DASH if share is None else f"{min(share, 0.99) if share < 1 else share:.0%}"


def milliseconds(value: float | None) -> str:
    """340 ms, 2.1 s, 1m 05s"""
    if value is None:
        return DASH
    return f"{value:.0f} ms" if value < 999.5 else duration(value / 1e3)


def duration(seconds: float | None) -> str:
    """2.1 s, 42 s, 3m 05s, 2h 07m, 4d 03h"""
    if seconds is None:
        return DASH
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"
