"""What q27app is told: the sections of `config.toml` with their defaults, and where each value came from.

A value is looked for in this order and the first hit wins: command-line flag, environment variable
`Q27APP_SECTION__KEY`, `config.toml` (which holds what the wizard chose), what is known about the card, the default below.
This file is the only reader of the process environment; everybody else asks its functions. Configs are immutable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from q27app.config_values import Origin, Rule, check_value, parse_words, read_file
from q27app.errors import UsageError

PREFIX = "Q27APP_"
PLAIN_VARIABLES = ("HOME", "CONFIG", "SHARED", "LONG_SCALE", "FORCE_ARCH", "MEMORY_CAP")
"""Variables `Q27APP_NAME` that are not settings: folders, the config file, what the test suite reads, and which older or
smaller card the card shall play."""


FLAGS = {
    "model.path": "--model", "model.context": "--ctx", "cache.directory": "--prefix-cache", "sampling.temperature": "--temp",
    "server.api_keys": "--api-key", "reasoning.default": "--think", "reasoning.budget": "--think-budget",
    "reasoning.request_thinking": "--request-think",
}
"""Command-line flags whose name is not the key's."""


PRESETS: dict[str, dict[str, Any]] = {
    "agentic": {
        "sampling.temperature": 1.0, "sampling.top_p": 0.95, "sampling.top_k": 20, "sampling.min_p": 0.05,
        "reasoning.default": "on", "reasoning.budget": "none",
    },
    "card": {
        "sampling.temperature": 1.0, "sampling.top_p": 0.95, "sampling.top_k": 20, "sampling.min_p": 0.0,
        "sampling.presence_penalty": 0.0, "reasoning.default": "on",
    },
    "card-coding": {
        "sampling.temperature": 0.6, "sampling.top_p": 0.95, "sampling.top_k": 20, "sampling.min_p": 0.0,
        "sampling.presence_penalty": 0.0, "reasoning.default": "on",
    },
    "card-instruct": {
        "sampling.temperature": 0.7, "sampling.top_p": 0.8, "sampling.top_k": 20, "sampling.min_p": 0.0,
        "sampling.presence_penalty": 1.5, "reasoning.default": "off",
    },
    "reference": {"model.kv": "exact", "model.draft": "off", "model.slots": 1, "model.fast_head": False},
}
"""Preset -> values. They count where neither file nor environment nor flag says otherwise.

reference: the plainest way to an answer, to compare others with. agentic: a cap on reasoning makes an agent end its turn
without an answer, and greedy choices make it loop. card: what the model card of Qwen3.6-27B recommends, for thinking in
general, for exact code, and without thinking.
"""


def setting(default: Any, *, low: float | None = None, high: float | None = None, choices: tuple[str, ...] = (),
            words: tuple[str, ...] = (), secret: bool = False) -> Any:
    """A Config field. low/high: bounds of a number; choices: the only strings allowed; words: strings allowed beside a
    number; secret: `config show` prints only how many there are."""
    return field(default=default, metadata={"rule": Rule(low, high, choices, words), "secret": secret})


@dataclass(frozen=True)
class ServerSection:
    """The HTTP daemon."""

    host: str = setting("127.0.0.1")
    """Address to listen on. Anything but a loopback address needs an API key, or allow_open_bind."""
    port: int = setting(8027, low=0, high=65535)
    """TCP port; 0 takes a free one and prints it."""
    api_keys: tuple[str, ...] = setting((), secret=True)
    """Keys that clients must send; empty = none needed. Prefer api_key_file: a config file is easily shared."""
    api_key_file: str = setting("")
    """File with one API key a line (blank lines and # comments skipped); must be readable by its owner only."""
    admin_keys: tuple[str, ...] = setting((), secret=True)
    """Keys for /admin routes; empty = the API keys open them, and without any key loopback does."""
    allowed_hosts: tuple[str, ...] = setting(())
    """More names that a Host header may carry, beside loopback names and the listening address."""
    allow_open_bind: bool = setting(False)
    """Listen on a non-loopback address without any key."""
    body_limit_mb: int = setting(64, low=1, high=1024)
    """Largest request body, MiB."""
    ping_interval_s: float = setting(10.0, low=0.05, high=3600)
    """Seconds of silence after which a stream sends a ping."""
    max_queue: int = setting(64, low=0, high=100_000)
    """Requests that may wait; the next one is refused with a time to try again."""
    capture: str = setting("")
    """Folder that keeps every request's body and figures, for the search of mistakes; "" = none is kept. Holds prompts."""
    capture_mb: int = setting(256, low=1, high=1_048_576)
    """Largest size of that folder, MiB; the oldest requests make room."""
    load_wait_s: float = setting(180.0, low=0, high=3600)
    """Longest time that a request waits for a model that is being loaded; after it, and with 0 at once, 503."""
    drain_timeout_s: float = setting(25.0, low=0, high=3600)
    """Seconds that running answers get to finish after SIGTERM."""


@dataclass(frozen=True)
class ModelSection:
    """What is served, and in which form."""

    path: str = setting("demo")
    """A .q27 file, the name of one in the models folder, or "demo" for the bundled model."""
    tokenizer: str = setting("")
    """tokenizer.json or .tok to use instead of what the model carries; "" = the model's own, or the file beside it."""
    template: str = setting("auto", choices=("auto", "official", "json", "xml"))
    """How a conversation becomes a prompt. auto: the checkpoint's own template where it has one, else json."""
    backend: str = setting("auto", choices=("auto", "cuda", "numpy"))
    """Where to compute. auto: CUDA if an NVIDIA device exists, else NumPy; a device that cannot be used is an error."""
    gpu: str = setting("auto")
    """Which card: UUID, PCI address, index, or part of its name. auto: the one with the most memory."""
    context: int | str = setting("auto", low=64, high=1_048_576, words=("auto",))
    """Window of a conversation, tokens. auto: the model's own, as far as memory reaches."""
    slots: int | str = setting("auto", low=1, high=64, words=("auto",))
    """Requests that run at the same time. auto: as many as memory and the backend make sensible."""
    kv: str = setting("auto", choices=("auto", "exact", "fp32", "fp16", "fp8", "turbo5k", "turbo3v", "turbo3"))
    """Format of the attention cache. auto: the best that the card computes with and that holds the window; exact: fp16 on a
    card, fp32 on NumPy."""
    embed: str = setting("auto", choices=("auto", "device", "host"))
    """Where the embedding table lies on a machine with a card. auto: on the card, or in host memory where that buys window."""
    draft: str = setting("auto", choices=("auto", "off", "mtp", "suffix"))
    """Where drafts come from: the model's draft layer (mtp), repeats of the text (suffix), auto = both. Never changes a text."""
    max_draft: int = setting(15, low=1, high=15)
    """Most drafts in one pass; how many of them are worth their price is measured as it goes."""
    fast_head: bool = setting(False)
    """In a tier with two heads let the smaller one decide: quicker, and another text now and then. Drafts always use it."""
    idle_unload: float = setting(0.0, low=0, high=604_800)
    """Seconds without a request after which the memory is given back; the next request loads the model again. 0 = never."""
    repos: tuple[str, ...] = setting(())
    """Where q27app pull finds a tier: entries "3.6/q4s=owner/repo:file.q27"."""


@dataclass(frozen=True)
class EngineSection:
    """The engine's step. Ordinary use leaves this alone."""

    prefill_chunk: int | str = setting("auto", low=64, high=65_536, words=("auto",))
    """Prompt tokens computed between two decode steps, a multiple of 64. auto: chosen for the backend."""
    warm_up: bool = setting(False)
    """Run every usual shape of a pass once before the first request, so that none waits for a recording."""


@dataclass(frozen=True)
class KernelsSection:
    """The GPU's programs and what they compute on."""

    nvcc: str = setting("")
    """Path of the CUDA compiler; "" = looked for on PATH, then where toolkits are installed, then where it was last found."""
    verify_weights: bool = setting(False)
    """Compute a checksum of the weights in device memory when they have been loaded; /health?verify=1 compares it."""


@dataclass(frozen=True)
class CacheSection:
    """The prefix cache: what one request computed of a prompt, the next ones need not."""

    enabled: bool = setting(True)
    """Keep the states of prompts. Never changes a text."""
    host_mb: int | str = setting("auto", low=0, high=1_048_576, words=("auto",))
    """Most host memory of kept states, MiB; on a card half of it is for those whose keys and values were needed by others.
    auto: a quarter of what is free, at most 16,384."""
    directory: str = setting("")
    """Folder where states survive a restart; "" = none. It holds what was in prompts, readable by its owner only."""
    disk_gb: int = setting(20, low=1, high=100_000)
    """Most bytes of that folder, GB; the least recently used entries go."""


@dataclass(frozen=True)
class SamplingSection:
    """What applies where a request does not say; a request's own field always wins."""

    preset: str = setting("", choices=("", *PRESETS))
    """A set of values for everything that is set nowhere else; "" = the defaults. agentic: what coding agents need;
    card, card-coding, card-instruct: the model card's samplers."""
    temperature: float = setting(0.0, low=0, high=100)
    """0 is greedy: always the most likely token."""
    top_k: int = setting(0, low=0, high=1_000_000)
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = setting(1.0, low=0, high=1)
    """Keep the most likely tokens that together have this probability; 1 = all."""
    min_p: float = setting(0.0, low=0, high=1)
    """Keep tokens at least this share as likely as the best; 0 = all."""
    presence_penalty: float = setting(0.0, low=-2, high=2)
    """Taken off the logit of every token that was generated already; 0 = off."""
    max_tokens: int = setting(8192, low=1, high=1_048_576)
    """Longest answer, tokens, reasoning included; the window may end it sooner."""


@dataclass(frozen=True)
class ReasoningSection:
    """Thinking before the answer."""

    default: str = setting("off", choices=("off", "on"))
    """Whether the model thinks when a request does not say."""
    effort: str = setting("auto", choices=("auto", "low", "medium", "xhigh"))
    """How long it thinks when a request does not say. auto: the checkpoint's own default."""
    budget: int | str = setting("auto", low=1, high=1_048_576, words=("auto", "none"))
    """Most reasoning tokens before it is closed. auto: half of a request's max_tokens; none: no limit."""
    request_thinking: bool = setting(True)
    """Obey the thinking fields of requests; false ignores them all."""


@dataclass(frozen=True)
class LogSection:
    """What the daemon writes to standard error, and to a file if there is one."""

    format: str = setting("text", choices=("text", "json"))
    """text for people, json for one object a line."""
    level: str = setting("info", choices=("debug", "info", "warning", "error"))
    """Least severe event that is written."""
    file: str = setting("")
    """Also write to this file; empty: none. Full ones become NAME.1 to NAME.3. A service needs none: the journal keeps its log."""
    file_mb: int = setting(8, low=1, high=1024)
    """Size at which the log file is full, MiB."""


@dataclass(frozen=True)
class Config:
    """All sections. `origins` maps "section.key" to where the value came from."""

    server: ServerSection = field(default_factory=ServerSection)
    """The HTTP daemon."""
    model: ModelSection = field(default_factory=ModelSection)
    """What is served."""
    engine: EngineSection = field(default_factory=EngineSection)
    """The engine's step."""
    kernels: KernelsSection = field(default_factory=KernelsSection)
    """The GPU's programs."""
    cache: CacheSection = field(default_factory=CacheSection)
    """The prefix cache."""
    sampling: SamplingSection = field(default_factory=SamplingSection)
    """Defaults of the sampler."""
    reasoning: ReasoningSection = field(default_factory=ReasoningSection)
    """Thinking."""
    log: LogSection = field(default_factory=LogSection)
    """The log."""
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    """Where each value came from."""


SECTIONS: dict[str, type] = {
    "server": ServerSection, "model": ModelSection, "engine": EngineSection, "kernels": KernelsSection,
    "cache": CacheSection,
    "sampling": SamplingSection, "reasoning": ReasoningSection, "log": LogSection,
}


def config_path() -> Path:
    """The file that `load_config` reads: $Q27APP_CONFIG, else config.toml in the config folder. It need not exist."""
    from q27app.paths import config_dir

    return Path(variable("Q27APP_CONFIG") or config_dir() / "config.toml")


def load_config(flags: Mapping[str, Any] | None = None, card: Mapping[str, Any] | None = None,
                path: Path | None = None) -> Config:
    """Merge all sources.

    flags and card: "section.key" -> value, None = not given; a flag's value may be its text. path: the file, default `config_path()`.
    Raises UsageError naming file and line, variable or flag, and what is allowed.
    """
    path = path or config_path()
    merged: dict[str, tuple[Any, Origin]] = {
        f"{section}.{item.name}": (item.default, Origin("default"))
        for section, kind in SECTIONS.items() for item in fields(kind)
    }
    for source in (_given(card, "card"), _from_file(path), _from_environment(), _given(flags, "flag")):
        merged.update(source)
    _apply_preset(merged)
    sections = {
        section: kind(**{item.name: merged[f"{section}.{item.name}"][0] for item in fields(kind)})
        for section, kind in SECTIONS.items()
    }
    return Config(**sections, origins={key: origin for key, (_, origin) in merged.items()})


def _apply_preset(merged: dict[str, tuple[Any, Origin]]) -> None:
    name = merged["sampling.preset"][0]
    for key, value in PRESETS.get(name, {}).items():
        if merged[key][1].kind in ("default", "card"):
            merged[key] = (value, Origin("preset", name))


def _field_of(section: str, key: str, where: str) -> Any:
    if section not in SECTIONS:
        raise UsageError(f"{where}: there is no section {section!r}.", f"Sections: {', '.join(SECTIONS)}.")
    by_name = {item.name: item for item in fields(SECTIONS[section])}
    if key not in by_name:
        raise UsageError(f"{where}: section {section!r} has no key {key!r}.", f"Keys: {', '.join(by_name)}.")
    return by_name[key]


def _given(values: Mapping[str, Any] | None, kind: str) -> dict[str, tuple[Any, Origin]]:
    result = {}
    for name, value in (values or {}).items():
        if value is not None:
            section, _, key = name.partition(".")
            where = FLAGS.get(name, "--" + key.replace("_", "-")) if kind == "flag" else name
            item = _field_of(section, key, f"{kind} {where}")
            if kind == "flag" and isinstance(value, str):
                value = parse_words(value, item.type, f"flag {where}")
            checked = check_value(value, item.type, item.metadata["rule"], f"{kind} {where}")
            result[name] = (checked, Origin(kind, where))
    return result


def _from_file(path: Path) -> dict[str, tuple[Any, Origin]]:
    result = {}
    for section, key, value, line in read_file(path):
        where = f"{path}:{line}"
        if section not in SECTIONS:
            raise UsageError(f"{where}: there is no section {section!r}.", f"Sections: {', '.join(SECTIONS)}.")
        if key is None:
            raise UsageError(f"{where}: {section!r} must be a section.", f"Write [{section}] on a line of its own.")
        if key == "":
            continue
        item = _field_of(section, key, where)
        checked = check_value(value, item.type, item.metadata["rule"], f"{where}: {section}.{key}")
        result[f"{section}.{key}"] = (checked, Origin("file", str(path), line))
    return result


def _from_environment() -> dict[str, tuple[Any, Origin]]:
    result = {}
    for name, text in sorted(os.environ.items()):
        if not name.startswith(PREFIX) or name[len(PREFIX):] in PLAIN_VARIABLES:
            continue
        section, separator, key = name[len(PREFIX):].lower().partition("__")
        if not separator:
            raise UsageError(f"{name}: not a variable of q27app.",
                             f"Settings are Q27APP_SECTION__KEY (two underscores); sections: {', '.join(SECTIONS)}.")
        item = _field_of(section, key, name)
        value = parse_words(text, item.type, name)
        result[f"{section}.{key}"] = (check_value(value, item.type, item.metadata["rule"], name),
                                      Origin("environment", name))
    return result


def variable(name: str) -> str:
    """The environment variable, or ""."""
    return os.environ.get(name, "")


def home_override() -> Path | None:
    """$Q27APP_HOME: one folder that holds config, data, cache and state."""
    value = variable("Q27APP_HOME")
    return Path(value).absolute() if value else None


def played_card() -> tuple[str | None, int | None]:
    """$Q27APP_FORCE_ARCH ("86": an older kind of card) and $Q27APP_MEMORY_CAP (bytes of the card that may be used)."""
    cap = variable("Q27APP_MEMORY_CAP")
    if cap and not cap.isdigit():
        raise UsageError(f"Q27APP_MEMORY_CAP is {cap!r}, expected a number of bytes.")
    return variable("Q27APP_FORCE_ARCH") or None, int(cap) if cap else None


def no_color() -> bool:
    """True if the user wants no colour: NO_COLOR holds anything, or the terminal is dumb."""
    return bool(variable("NO_COLOR")) or variable("TERM") == "dumb"


def notify_socket() -> str:
    """Where a supervisor (systemd) listens for READY=1 and WATCHDOG=1, or ""."""
    return variable("NOTIFY_SOCKET")


def watchdog_usec() -> int:
    """Microseconds within which the supervisor expects a sign of life; 0 = it doesn't watch."""
    text = variable("WATCHDOG_USEC")
    return int(text) if text.isdigit() else 0


def child_environment(changes: Mapping[str, str] | None = None, settings: bool = True) -> dict[str, str]:
    """A copy of the environment for a program that we start. settings False: without any Q27APP_SECTION__KEY."""
    copy = {name: value for name, value in os.environ.items()
            if settings or not (name.startswith(PREFIX) and "__" in name)}
    copy.update(changes or {})
    return copy


def set_process_variable(name: str, value: str) -> None:
    """For libraries that only listen to the environment; before they are imported."""
    os.environ[name] = value
