"""Getting models into the models folder and out of it: pull, import, show, rm.

Where the tiers' .q27 files are published is not known to this version: a tier's name means what `model.repos` in config.toml
says (entries "GENERATION/TIER=OWNER/REPO:FILE"), and without an entry is refused before anything is asked of a hub.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q27app.errors import NotFound, Q27Error, Unreachable, UsageError
from q27app.paths import ensured, installed_models, models_dir
from q27app.setup.download import STALL_S, Progress, Remote, download
from q27app.weights.tiers import GENERATIONS, QUANTISED_TIERS

WEIGHT_FILES = (".q27", ".gguf")
SIDE_FILES = (".safetensors", ".json", ".txt", ".jinja", ".md")


@dataclass(frozen=True)
class Source:
    """Files to fetch. file: None for all of a checkpoint's."""

    repo: str
    file: str | None


def known_sources(repos: Iterable[str]) -> dict[tuple[str, str], str]:
    """(generation, tier) -> "OWNER/REPO:FILE", of the entries of model.repos. Raises UsageError."""
    table = {}
    for entry in repos:
        match = re.fullmatch(r"(?:(3\.[68])/)?([a-z0-9]+)=([^:\s]+/[^:\s]+):([^:\s]+)", entry)
        if match is None:
            raise UsageError(f"model.repos has {entry[:80]!r}.", 'Expected entries such as "3.6/q4s=owner/repo:file.q27".')
        for known in [match[1]] if match[1] else GENERATIONS:
            table[known, match[2]] = f"{match[3]}:{match[4]}"
    return table


def find_source(text: str, generation: str, repos: Iterable[str] = ()) -> Source:
    """What TIER or REPO[:FILE] means. Raises UsageError."""
    if text in QUANTISED_TIERS:
        source = known_sources(repos).get((generation, text))
        if source is None:
            raise UsageError(
                f"this version knows no repository where tier {text} of Qwen{generation}-27B is published.",
                f'Name one: q27app pull OWNER/REPO:FILE, or in config.toml under [model]: repos = ["{generation}/{text}=owner/repo:file.q27"]. '
                "Or make the tier yourself: q27app convert FOLDER my.q27 --tier " + text + ".")
        return Source(*source.split(":", 1))
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w./-]+))?", text)
    if match is None or ".." in text:
        raise UsageError(f"{text[:80]!r} is neither a tier nor a repository.",
                         f"Give one of {', '.join(QUANTISED_TIERS)}, or OWNER/NAME[:FILE].")
    return Source(match[1], match[2])


def pull(source: Source, progress: Progress | None = None, stall_s: float = STALL_S, **options: Any) -> list[Path]:
    """Fetch the source's files into the models folder; those that are there in full are kept. Raises Q27Error."""
    from huggingface_hub import constants, get_token

    folder = ensured(models_dir())
    try:
        names = [source.file] if source.file else _list_files(source.repo)
        if not source.file and len(names) > 1:
            folder = ensured(folder / source.repo.replace("/", "--"))
        asks = {name: _asker(source.repo, name, constants.ENDPOINT, get_token() or "") for name in names}
        sizes = {name: ask().size for name, ask in asks.items()}
    except OSError as error:
        raise Unreachable(f"{source.repo}: {error}.", "Try again later.") from error
    total, done, paths = sum(sizes.values()), 0, []
    for name in names:
        target = folder / Path(name).name
        if not (target.is_file() and target.stat().st_size == sizes[name]):
            base = done
            report = None if progress is None else lambda got, _, what, base=base: progress(base + got, total, what)
            download(asks[name], target, report, stall_s, **options)
        done += sizes[name]
        paths.append(target)
    return paths


def _list_files(repo: str) -> list[str]:
    """One .q27 or GGUF if there is just one, else the files of a safetensors folder."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(repo)
    except Exception as error:  # the library raises kinds of its own and of its HTTP client
        raise _hub_error(repo, error) from error
    weights = [name for name in names if name.endswith(WEIGHT_FILES)]
    if len(weights) == 1:
        return weights
    if weights:
        raise UsageError(f"{repo} holds {len(weights)} models.", f"Choose one: {repo}:FILE with {', '.join(weights[:12])}.")
    found = [name for name in names if name.endswith(SIDE_FILES) and "/" not in name]
    if not any(name.endswith(".safetensors") for name in found):
        raise UsageError(f"{repo} holds no .q27, GGUF or safetensors file.")
    return found


def _asker(repo: str, name: str, endpoint: str, token: str) -> Callable[[], Remote]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo, name)

    def ask() -> Remote:
        try:
            facts = get_hf_file_metadata(url)
        except Exception as error:
            raise _hub_error(f"{repo}:{name}", error) from error
        if facts.size is None or facts.etag is None:
            raise Unreachable(f"{repo}:{name}: the server tells neither size nor etag.", "Check HF_ENDPOINT.")
        return Remote(facts.location, facts.size, facts.etag, endpoint, token)

    return ask


def _hub_error(what: str, error: Exception) -> Q27Error:
    status = getattr(getattr(error, "response", None), "status_code", None)
    line = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    if status == 404:
        return NotFound(f"{what}: the hub has no such repository or file.", "Check the name.")
    if status in (401, 403):
        return UsageError(f"{what}: the hub refuses access ({status}).", "Check the name; for a gated model log in: hf auth login.")
    if status == 429 or (status or 0) >= 500:
        raise OSError(f"the hub answered {status}") from error
    return Unreachable(f"{what}: the hub cannot be asked: {line}", "Check the network, and HF_ENDPOINT if it is set.")


@dataclass(frozen=True)
class Import:
    """What an import would do. kind: q27, gguf or safetensors; the latter two are converted."""

    kind: str
    source: Path
    target: Path


def plan_import(path: Path) -> Import:
    """Recognise a .q27, a GGUF or a safetensors folder by content, and check a .q27. Raises Q27Error naming what is wrong."""
    if path.is_dir():
        if not any(path.glob("*.safetensors")):
            raise UsageError(f"{path}: the folder holds no *.safetensors.", "Give a checkpoint's folder, a .q27 or a GGUF.")
        return Import("safetensors", path, models_dir() / f"{path.resolve().name}.q27")
    try:
        with path.open("rb") as data:
            magic = data.read(4)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.", "Give a file or folder that exists.") from error
    if magic == b"GGUF":
        return Import("gguf", path, models_dir() / f"{path.stem}.q27")
    if magic != b"Q27F":
        raise UsageError(f"{path}: starts with {magic!r}; neither a .q27 nor a GGUF.", "Download it again, or convert its source.")
    from q27app.setup.checkpoints import checkpoint_of

    checkpoint_of(path)
    return Import("q27", path, models_dir() / f"{path.stem}.q27")


def place(plan: Import, how: str) -> Path:
    """Bring a .q27 to its place. how: copy, link (symbolic) or move. Raises UsageError; never overwrites."""
    ensured(plan.target.parent)
    if plan.target.exists() or plan.target.is_symlink():
        raise UsageError(f"{plan.target} exists.", f"Remove it first: q27app rm {plan.target.stem}.")
    if how == "link":
        plan.target.symlink_to(plan.source.resolve())
        return plan.target
    if how == "move":
        shutil.move(plan.source, plan.target)
        return plan.target
    size, free = plan.source.stat().st_size, shutil.disk_usage(plan.target.parent).free
    if size > free:
        raise UsageError(f"{plan.target.parent}: {free / 1e9:.3f} GB are free, the file has {size / 1e9:.3f} GB.",
                         "Free some space, or use --link; --move where the file lies on the same disk.")
    part = plan.target.with_name(plan.target.name + ".part")
    try:
        shutil.copyfile(plan.source, part)
        os.replace(part, plan.target)
    finally:
        part.unlink(missing_ok=True)
    return plan.target


def find_installed(name: str) -> Path:
    """A model of the models folder, by name with or without .q27. Raises UsageError."""
    for path in installed_models():
        if name in (path.stem, path.name):
            return path
    if name == "demo":
        raise UsageError("demo is the bundled model, a part of the program: it stays.", "q27app uninstall takes the program away.")
    names = ", ".join(path.stem for path in installed_models()) or "none yet"
    raise UsageError(f"there is no model {name[:80]!r} in {models_dir()}.", f"Models: {names}.")


def remove(name: str) -> tuple[Path, int]:
    """Delete a model of the models folder; a link goes, not what it points to. (path, bytes freed)."""
    path = find_installed(name)
    size = 0 if path.is_symlink() else path.stat().st_size
    path.unlink()
    for suffix in (".lock", ".part", ".part.json"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return path, size
