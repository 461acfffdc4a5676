"""Commands that turn text into tokens and tokens into more of them: generate, tokens.

`generate` runs the engine in this process, along the path that the daemon uses: one `Request`, no chat template.
"""

from __future__ import annotations

import itertools
import json
import queue
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from q27app.errors import BadRequest, EngineDied, ModelError, Q27Error, UsageError

if TYPE_CHECKING:
    import numpy as np

    from q27app.chat.tokenizer import Tokenizer
    from q27app.engine.engine import Engine
    from q27app.engine.request import Request, TokenEvent

MAX_IDS = 4_000_000
POLL_S = 0.05


def parse_ids(text: str, where: str) -> list[int]:
    """Token ids separated by commas, spaces or newlines; brackets around them are allowed. Raises UsageError."""
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    if len(words) > MAX_IDS:
        raise UsageError(f"{where}: {len(words)} token ids are too many.", f"At most {MAX_IDS}.")
    bad = next((word for word in words if not (word.isascii() and word.isdigit() and len(word) <= 9)), None)
    if bad is not None:
        raise UsageError(f"{where}: {bad[:40]!r} is not a token id.", "Whole numbers from 0, such as 1,2,3.")
    return [int(word) for word in words]


def tokenizer_of(model: str, named: str = "") -> Tokenizer:
    """The tokenizer of a model (path, name or "demo"), or the named file's. Raises Q27Error if there is none."""
    from q27app.daemon.tokenizer_file import open_tokenizer
    from q27app.paths import resolve_model

    return open_tokenizer(Path() if named else resolve_model(model), named)


@click.command()
@click.option("--model", "-m", metavar="M", help="Path, name in the models folder, or demo.")
@click.option("--prompt", metavar="TEXT", help="Text to continue, as it is: no chat template; - reads it from standard input.")
@click.option("--tokens", "token_text", metavar="1,2,3", help="Token ids to continue; - reads them from standard input.")
@click.option("--max-tokens", "-n", default=128, show_default=True, type=click.IntRange(0), help="Tokens to generate.")
@click.option("--temperature", type=float, metavar="T", help="0 is greedy.")
@click.option("--top-k", type=int, metavar="K")
@click.option("--top-p", type=float, metavar="P")
@click.option("--min-p", type=float, metavar="P")
@click.option("--presence-penalty", type=float, default=0.0)
@click.option("--frequency-penalty", type=float, default=0.0)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Same seed, same text.")
@click.option("--ignore-eos", is_flag=True, help="Go on past end-of-text tokens.")
@click.option("--control", is_flag=True, help="Read control tokens such as <|im_start|> in --prompt as what they are.")
@click.option("--backend", metavar="auto|cuda|numpy")
@click.option("--ctx", metavar="N|auto", help="Window, tokens.")
@click.option("--dump-logits", metavar="FILE.npy", help="Write float32 [prompt positions, vocabulary].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: prompt_tokens, tokens, text, finish, timings.")
def generate(model: str | None, prompt: str | None, token_text: str | None, max_tokens: int, temperature: float | None,
             top_k: int | None, top_p: float | None, min_p: float | None, presence_penalty: float,
             frequency_penalty: float, seed: int, ignore_eos: bool, control: bool, backend: str | None,
             ctx: str | None, dump_logits: str | None, as_json: bool) -> None:
    """Continue a prompt once, without a daemon.

    Prints text for --prompt and ids for --tokens.
    """
    from q27app.config import load_config
    from q27app.engine.request import Request, SamplingParams

    if (prompt is None) == (token_text is None):
        raise click.UsageError("Give either --prompt or --tokens.")
    if prompt == "-":
        prompt = _standard_input()
    if token_text == "-":
        token_text = _standard_input()
    config = load_config({"model.path": model, "model.backend": backend, "model.context": ctx,
                          "sampling.temperature": temperature, "sampling.top_k": top_k, "sampling.top_p": top_p,
                          "sampling.min_p": min_p})
    tokenizer = _tokenizer_if_any(config, needed=prompt is not None)
    ids = tokenizer.encode(prompt, control=control) if prompt is not None else parse_ids(token_text or "", "--tokens")
    if not ids:
        raise UsageError("the prompt is empty.", "Give at least one token.")
    drawn = config.sampling
    params = SamplingParams(drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p, presence_penalty,
                            frequency_penalty, None, seed, max_tokens, ignore_eos)
    request = Request("generate", tuple(ids), params, eos_ids=tuple(tokenizer.eos_ids) if tokenizer else (),
                      prompt_logits=dump_logits is not None, client="cli")
    started = time.monotonic()
    engine = start_engine(config)
    try:
        loaded = time.monotonic()
        printer = None if as_json else _Printer(tokenizer if prompt is not None else None)
        answer = _Answer()
        for event in events(engine, request):
            answer.add(event)
            if printer:
                printer.add(event.tokens)
        if printer:
            printer.end()
    finally:
        engine.close()
    if dump_logits is not None:
        save_logits(Path(dump_logits), answer.prompt_logits)
    if as_json:
        text = tokenizer.decode(answer.tokens) if tokenizer else None
        click.echo(json.dumps({"prompt_tokens": ids, "tokens": answer.tokens, "text": text, "finish": answer.finish,
                               "timings": answer.timings(loaded - started, time.monotonic() - loaded)}))


def _tokenizer_if_any(config: Any, needed: bool) -> Tokenizer | None:
    """None only where ids alone will do and the model carries no tokenizer."""
    try:
        return tokenizer_of(config.model.path, config.model.tokenizer)
    except ModelError:
        if needed:
            raise
        return None


def start_engine(config: Any) -> Engine:
    """A loaded engine as the configuration wants it, with one slot. Raises what went wrong; Ctrl-C gives up."""
    import logging

    from q27app.engine.engine import Engine, EngineConfig
    from q27app.paths import resolve_model

    logging.getLogger("q27app").addHandler(logging.NullHandler())  # what goes wrong is raised here, and told once
    chosen = config.model
    engine = Engine(EngineConfig(
        model=resolve_model(chosen.path), backend=chosen.backend,
        context=None if chosen.context == "auto" else chosen.context,
        nvcc=config.kernels.nvcc or None,
        slots=1, kv_format=chosen.kv, embed=chosen.embed, draft=chosen.draft, max_draft=chosen.max_draft,
        fast_head=chosen.fast_head,
        prefill_chunk=None if config.engine.prefill_chunk == "auto" else config.engine.prefill_chunk))
    engine.start()
    try:
        while (status := engine.status()).state == "loading" or status.state == "unloaded":
            time.sleep(POLL_S)
        if status.state != "ready":
            raise _load_error(status)
    except BaseException:
        engine.close()
        raise
    return engine


def _load_error(status: Any) -> Q27Error:
    if isinstance(status.error, Q27Error):
        return status.error
    return EngineDied(f"the engine is {status.state}: {status.error or 'no reason given'}.")


def events(engine: Engine, request: Request) -> Any:
    """Yield a request's TokenEvents up to the final one; leaving early cancels it. Raises the event's error."""
    from q27app.engine.request import FinishReason

    inbox: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    try:
        engine.submit(request, inbox.put)
    except BadRequest as error:
        raise UsageError(error.message, error.hint) from error
    is_done = False
    try:
        while not is_done:
            event = inbox.get()
            is_done = event.finish is not None
            if event.finish is FinishReason.ERROR:
                raise event.error or EngineDied("the request ended without a reason.")
            yield event
    finally:
        if not is_done:
            engine.cancel(request.id)


class _Answer:
    """What the events of one request add up to."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish = ""
        self.stats: Any = None
        self.prompt_logits: np.ndarray | None = None

    def add(self, event: TokenEvent) -> None:
        self.tokens.extend(event.tokens)
        if event.prompt_logits is not None:
            self.prompt_logits = event.prompt_logits
        if event.finish is not None:
            self.finish, self.stats = event.finish.value, event.stats

    def timings(self, load_s: float, total_s: float) -> dict[str, float]:
        """Milliseconds and tokens per second."""
        result = {"load_ms": load_s * 1e3, "total_ms": total_s * 1e3}
        if self.stats is not None:
            prefill, decode = self.stats.prefill_ms, self.stats.decode_ms
            computed = self.stats.num_prompt - self.stats.num_cached
            result |= {"prefill_ms": prefill, "decode_ms": decode,
                       "prefill_tokens_per_s": computed / prefill * 1e3 if prefill else 0.0,
                       "decode_tokens_per_s": len(self.tokens) / decode * 1e3 if decode else 0.0}
        return {name: round(value, 3) for name, value in result.items()}


class _Printer:
    """Prints an answer while it comes: text with a tokenizer, else ids with commas."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        from q27app.chat.tokenizer import Detokenizer

        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._separator = ""

    def add(self, tokens: tuple[int, ...]) -> None:
        if self._detokenizer:
            click.echo(self._detokenizer.push(tokens), nl=False)
        elif tokens:
            click.echo(self._separator + ",".join(map(str, tokens)), nl=False)
            self._separator = ","

    def end(self) -> None:
        click.echo(self._detokenizer.flush() if self._detokenizer else "")


def save_logits(path: Path, logits: np.ndarray | None) -> None:
    """Write a .npy file under exactly this name. Raises UsageError if it cannot be written."""
    import numpy as np

    if logits is None:
        raise EngineDied("the engine returned no prompt logits.")
    try:
        with path.open("wb") as file:
            np.save(file, np.asarray(logits, dtype=np.float32))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}.", "Name a file that you may write.") from error


@click.group()
def tokens() -> None:
    """Turn text into token ids and back."""


MODEL_OR_TOKENIZER = click.option("--model", "-m", metavar="M",
                                  help="Model (path, name, demo), tokenizer.json, GGUF or .tok file.")


@tokens.command()
@MODEL_OR_TOKENIZER
@click.option("--control", is_flag=True, help="Read control tokens such as <|im_start|> as what they are.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: tokens, count.")
def encode(model: str | None, control: bool, as_json: bool) -> None:
    """Text on standard input, every byte of it, to ids separated by commas."""
    tokenizer = _tokens_tokenizer(model)
    text = _standard_input()
    ids = tokenizer.encode(text, control=control)
    click.echo(json.dumps({"tokens": ids, "count": len(ids)}) if as_json else ",".join(map(str, ids)))


def _standard_input() -> str:
    """All of it, every byte; refuses what is not UTF-8."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}.",
                         "Convert the text to UTF-8.") from error


@tokens.command()
@MODEL_OR_TOKENIZER
@click.option("--json", "as_json", is_flag=True, help="One JSON object: text, count.")
def decode(model: str | None, as_json: bool) -> None:
    """Ids on standard input, separated by commas, spaces or newlines, to text; control tokens are spelled out."""
    tokenizer = _tokens_tokenizer(model)
    text_in = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    given = re.fullmatch(r'\s*\{.*?"tokens"\s*:\s*(\[[^\]]*\]).*\}\s*', text_in, re.DOTALL)
    ids = parse_ids(given.group(1) if given else text_in, "standard input")
    unknown = next((token for token in ids if token >= tokenizer.vocab_size), None)
    if unknown is not None:
        raise UsageError(f"token id {unknown} is outside the vocabulary.", f"Ids are 0 to {tokenizer.vocab_size - 1}.")
    text = _spell(tokenizer, ids)
    if as_json:
        click.echo(json.dumps({"text": text, "count": len(ids)}))
    else:
        sys.stdout.buffer.write(text.encode("utf-8", errors="replace"))
        sys.stdout.buffer.flush()


def _spell(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of ids, control tokens spelled out."""
    names = {token: name for name, token in tokenizer.control_ids.items()}
    groups = itertools.groupby(ids, key=names.get)
    return "".join(name * len(list(group)) if name else tokenizer.decode(group) for name, group in groups)


def _tokens_tokenizer(model: str | None) -> Tokenizer:
    from q27app.config import load_config

    chosen = load_config({"model.path": model}).model
    return tokenizer_of(chosen.path, "" if model else chosen.tokenizer)
