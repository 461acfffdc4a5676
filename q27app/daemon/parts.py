"""What a configuration names: the engine's settings, and the tokenizer and template that go with its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q27app.engine.loading import EngineConfig

if TYPE_CHECKING:
    from q27app.chat.template import Template
    from q27app.chat.tokenizer import Tokenizer
    from q27app.config import Config
    from q27app.engine.engine import Engine


def open_parts(config: Config) -> tuple[Engine, Tokenizer, Template]:
    """Engine (not started), tokenizer and template of the configured model. Raises Q27Error."""
    from q27app.engine.engine import Engine

    tokenizer, template = open_text(config)
    return Engine(engine_settings(config)), tokenizer, template


def open_text(config: Config) -> tuple[Tokenizer, Template]:
    """Tokenizer and template of the configured model. Raises Q27Error."""
    from q27app.chat.template import open_template
    from q27app.daemon.tokenizer_file import open_tokenizer, read_metadata
    from q27app.paths import resolve_model

    path = resolve_model(config.model.path)
    metadata = read_metadata(path)
    tokenizer = open_tokenizer(path, config.model.tokenizer, metadata)
    return tokenizer, open_template(metadata, tokenizer, config.model.template)


def engine_settings(config: Config) -> EngineConfig:
    """What the engine is told. Raises UsageError for a model that is not there."""
    from q27app.paths import resolve_model

    model, server = config.model, config.server
    return EngineConfig(
        model=resolve_model(model.path),
        backend=model.backend,
        gpu=model.gpu,
        context=_number(model.context),
        slots=_number(model.slots),
        kv_format=model.kv,
        embed=model.embed,
        draft=model.draft,
        max_draft=model.max_draft,
        fast_head=model.fast_head,
        warm_up=config.engine.warm_up,
        max_queue=server.max_queue,
        prefill_chunk=_number(config.engine.prefill_chunk),
        nvcc=config.kernels.nvcc or None,
        verify_weights=config.kernels.verify_weights,
        cache=config.cache.enabled,
        cache_host_bytes=None if config.cache.host_mb == "auto" else int(config.cache.host_mb) << 20,
        cache_dir=config.cache.directory or None,
        cache_disk_bytes=config.cache.disk_gb * 10**9,
    )


def _number(value: int | str) -> int | None:
    return None if value == "auto" else int(value)
