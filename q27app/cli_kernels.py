"""The command that looks after compiled kernels: kernels build, list, clear."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from q27app.errors import GpuError, UsageError

if TYPE_CHECKING:
    from q27app.kernels.card import Card
    from q27app.kernels.compiler import Compiler, Job


@click.group()
def kernels() -> None:
    """Compile, show or remove the GPU's programs."""


def _folder() -> Path:
    from q27app.paths import cache_dir

    return cache_dir() / "kernels"


def _compiler(target: str) -> Compiler:
    from q27app.config import load_config
    from q27app.kernels.compiler import Compiler

    return Compiler(_folder(), target, load_config().kernels.nvcc or None)


def _card(arch: str | None) -> Card:
    """The kind of card that is asked for, else this machine's first."""
    from q27app.gpu import read_gpus
    from q27app.kernels.card import card_of

    if arch is not None:
        return card_of(arch)
    found = next((gpu.compute_capability for gpu in read_gpus() if gpu.compute_capability), None)
    if found is None:
        raise GpuError("no NVIDIA card answers, so that there is none to compile for.",
                       "Name a kind of card: --arch 86 (3090), 89 (4090), 90 (H200), 120 (5090).")
    return card_of(f"{found[0]}{found[1]}")


def _jobs(card: Card, model: str | None, kv: str | None) -> list[Job]:
    """Every program that serving a model on such a card needs; each KV format that it computes with."""
    from q27app.config import load_config
    from q27app.kernels.compiler import Job
    from q27app.kernels.cuda_backend import fixed_defines, geometry_defines
    from q27app.model.budget import kv_formats_for
    from q27app.model.config import ModelConfig
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    with open_container(resolve_model(model or load_config().model.path)) as container:
        shapes = {name: tuple(tensor.shape) for name, tensor in container.tensors.items()}
        geometry = ModelConfig.from_metadata(container.metadata, shapes)
    usable = kv_formats_for(card.capability, geometry.head_dim)
    if kv is not None and kv not in usable:
        raise UsageError(f"--kv is {kv[:40]!r}, expected one of {', '.join(usable)} for compute capability "
                         f"{card.capability[0]}.{card.capability[1]}.")
    defines: list[tuple[str, dict[str, int]]] = list(fixed_defines(card).items())
    for name in [kv] if kv else usable:
        defines += geometry_defines(geometry, card, name).items()
    return list(dict.fromkeys(Job.of(source, values) for source, values in defines))


class _Bar:
    """One line on standard error that renews itself; elsewhere than on a terminal, a line for each program."""

    def __init__(self) -> None:
        self._started, self._is_terminal = time.monotonic(), sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if not total:
            return
        line = f"compiled {done} of {total}, {time.monotonic() - self._started:.0f} s"
        sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if done == total else "") if self._is_terminal else line + "\n")
        sys.stderr.flush()


@kernels.command()
@click.option("--arch", metavar="N", help="Compute capability, as in 86; default: this machine's card.")
@click.option("--model", "-m", metavar="M", help="Whose shapes to compile for; default: the configured model.")
@click.option("--kv", metavar="F", help="Only this KV format.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def build(arch: str | None, model: str | None, kv: str | None, as_json: bool) -> None:
    """Compile what serving a model needs, so that its first start is quick.

    Also for another kind of card than this machine's.
    """
    card = _card(arch)
    compiler = _compiler(card.target)
    jobs = _jobs(card, model, kv)
    compiler.resolve()
    missing = sum(not compiler.path(job).exists() for job in jobs)
    started = time.monotonic()
    compiler.build(jobs, None if as_json else _Bar())
    result = {"target": card.target, "folder": str(compiler.cache), "nvcc": compiler.resolve(), "compiled": missing,
              "kept": len(jobs) - missing, "seconds": round(time.monotonic() - started, 2)}
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(f"{card.target}: {missing} programs compiled in {result['seconds']:.1f} s, {len(jobs) - missing} were "
                   f"there, in {compiler.cache}")


def _entries() -> list[dict[str, Any]]:
    from q27app.kernels.compiler import describe

    return describe(_folder())


@kernels.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def list_kernels(as_json: bool) -> None:
    """Show the compiled programs, the newest first."""
    rows = _entries()
    total = sum(row["bytes"] for row in rows)
    if as_json:
        click.echo(json.dumps({"version": 1, "folder": str(_folder()), "bytes": total, "entries": rows}, indent=2))
        return
    for row in rows:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["made_at"]))
        click.echo(f"{made}  {row['target']:<12} {row['source']:<16} {row['bytes'] / 1e3:>8.0f} kB  {row['name']}")
    click.echo(f"{len(rows)} programs, {total / 1e6:.1f} MB in {_folder()}", err=True)


@kernels.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def clear(as_json: bool) -> None:
    """Remove every compiled program; the next start compiles them again. A daemon that runs is not disturbed."""
    rows = _entries()
    freed = sum(row["bytes"] for row in rows)
    for row in rows:
        (_folder() / row["name"]).unlink(missing_ok=True)
    if as_json:
        click.echo(json.dumps({"removed": len(rows), "bytes": freed, "folder": str(_folder())}))
    else:
        click.echo(f"{len(rows)} programs removed, {freed / 1e6:.1f} MB freed in {_folder()}")
