"""Benchmarks over HTTP: bench speed, concurrency, turns, needle, soak, canonical."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from q27app.cli_bench import LISTS, bench, end_report, interruptible, journal_path, report_options, say_progress
from q27app.errors import Q27Error, UsageError


def server_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which servers are asked."""
    for option in (
        click.option("--serve", "serves", multiple=True, metavar="MODEL[,kv=K,ctx=N,...]",
                     help="Start a daemon of our own for this measurement; may be repeated (tiers, KV formats)."),
        click.option("--model", "model_name", metavar="NAME", help="The model's name in requests; default: the server's first."),
        click.option("--key", metavar="KEY", help="API key, or @FILE; default for our daemon: the configuration's."),
        click.option("--url", "urls", multiple=True, metavar="[NAME=]URL",
                     help="A server of OpenAI's dialect; may be repeated for one table. Default: the configured daemon."),
    ):
        function = option(function)
    return function


def _targets(urls: tuple[str, ...], key: str | None, serves: tuple[str, ...]) -> list[tuple[str, str, str, str]]:
    """(label, url, key, spec to serve) of each server."""
    from q27app.bench.endpoint import parse_serve
    from q27app.cli_tui import _where

    found = []
    for given in urls or (() if serves else ("",)):
        name, is_named, rest = given.partition("=") if "=" in given.partition("/")[0] else ("", "", given)
        url, used_key = _where(rest or None, key)
        found.append((name if is_named else url, url, used_key, ""))
    found += [(parse_serve(spec)[0], "", "", spec) for spec in serves]
    labels = [target[0] for target in found]
    if len(set(labels)) != len(labels) or any("|" in label for label in labels):
        raise UsageError(f"the servers' names are {', '.join(labels)}: each must be another, without |.", "Use --url NAME=URL.")
    return found


def run_bench(module: Any, name: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Measure what the journal lacks on every server, then report, also after an interruption or an error."""
    from q27app.bench.journal import Journal
    from q27app.bench.plots import check_plot
    from q27app.bench.stamp import make_stamp

    check_plot(options["plot"])
    targets = _targets(options["urls"], options["key"], options["serves"])
    path = journal_path(options["out"], name)
    say = say_progress(options["as_json"])
    settings = {**settings, "servers": [label for label, *_ in targets], "model_name": options["model_name"] or ""}
    problem: BaseException | None = None
    with Journal(path, name, settings, make_stamp()) as journal:
        say(f"{journal.path}" + (f": {journal.num_kept} rows are there already" if journal.num_kept else ""))
        try:
            with interruptible():
                for target in targets:
                    _measure_one(module, target, options["model_name"] or "", journal, settings, say)
        except (KeyboardInterrupt, Q27Error) as error:
            problem = error
        end_report(module.make_report(journal, _facts(journal)), options, problem, journal.path)


def _measure_one(module: Any, target: tuple[str, str, str, str], model: str, journal: Any, settings: dict[str, Any],
                 say: Callable[[str], None]) -> None:
    from q27app.bench.endpoint import open_endpoint, served

    label, url, key, spec = target
    if not journal.missing(module.keys(label, settings)):
        return

    async def measure() -> None:
        async with open_endpoint(url, key, model, label) as endpoint:
            if not journal.has(f"{label}|server"):
                journal.add(f"{label}|server", facts=endpoint.facts)
            await module.measure(endpoint, journal, settings, say)

    with ExitStack() as stack:
        if spec:
            say(f"starting {spec}")
            _, url = stack.enter_context(served(spec))
        asyncio.run(measure())


def _facts(journal: Any) -> dict[str, dict[str, Any]]:
    """label -> what each server said about itself; the only server's figures join the stamp."""
    facts = {key.removesuffix("|server"): row["facts"] for key, row in journal.rows.items() if key.endswith("|server")}
    if len(facts) == 1:
        journal.stamp |= next(iter(facts.values()))
    return facts


@bench.command()
@server_options
@report_options
@click.option("--depths", type=LISTS, default="0,8192,32768,131072", show_default=True, metavar="N,N", help="Prompt lengths, tokens; none: -.")
@click.option("--depth-runs", default=2, show_default=True, type=click.IntRange(1, 100), help="Cold and warm answers of each depth.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(2, 65536), help="Tokens generated at each depth.")
@click.option("--prompts", default="narrative,code", show_default=True, metavar="A,B", help="narrative, code; none: -.")
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1, 1000), help="Measured answers of each prompt.")
@click.option("--warmups", default=3, show_default=True, type=click.IntRange(0, 100), help="Unmeasured answers before them.")
@click.option("--max-tokens", default=1000, show_default=True, type=click.IntRange(2, 65536), help="At most so many in those.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the texts.")
@click.option("--pause", "pause_s", default=0.2, show_default=True, type=click.FloatRange(0, 3600), help="Seconds between answers.")
def speed(depths: list[int], depth_runs: int, tokens: int, prompts: str, runs: int, warmups: int, max_tokens: int, seed: int,
          pause_s: float, **options: Any) -> None:
    """Prefill, decode and first token, at depths and on two known prompts.

    \b
    q27app bench speed --serve demo,kv=fp16 --serve demo,kv=fp8
    q27app bench speed --url llama=http://127.0.0.1:8080 --url http://127.0.0.1:8027 --csv speed.csv
    """
    from q27app.bench import speed as module
    from q27app.bench.prompts import CANONICAL

    names = [name for name in prompts.split(",") if name not in ("", "-")]
    for name in names:
        if name not in CANONICAL:
            raise UsageError(f"--prompts {prompts}: there is no {name!r}.", f"Prompts: {', '.join(CANONICAL)}.")
    run_bench(module, "speed", {"depths": depths, "depth_runs": depth_runs, "tokens": tokens, "prompts": names, "runs": runs,
                                "warmups": warmups, "max_tokens": max_tokens, "seed": seed, "pause_s": pause_s}, options)


@bench.command()
@server_options
@report_options
@click.option("--streams", type=LISTS, default="1,2,4,8,16", show_default=True, metavar="N,N", help="Streams at once.")
@click.option("--prompt", default=512, show_default=True, type=click.IntRange(1, 1 << 20), help="Prompt tokens of each.")
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(2, 65536), help="Generated tokens of each.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the texts.")
def concurrency(streams: list[int], prompt: int, tokens: int, seed: int, **options: Any) -> None:
    """What 1 to 16 streams get together and each."""
    from q27app.bench import concurrency as module

    if not streams or not all(1 <= count <= 256 for count in streams):
        raise UsageError("--streams: expected numbers from 1 to 256.")
    run_bench(module, "concurrency", {"streams": streams, "prompt": prompt, "tokens": tokens, "seed": seed}, options)


@bench.command()
@server_options
@report_options
@click.option("--turns", default=12, show_default=True, type=click.IntRange(1, 1000), help="Turns; 12 and 30 are usual.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1, 65536), help="Tokens of each answer.")
@click.option("--scale", default=1.0, show_default=True, type=click.FloatRange(0.01, 100), help="Size of system text and results.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the transcript.")
@click.option("--tools/--no-tools", default=True, show_default=True, help="Declare the agent's tools.")
@click.option("--fixed-length/--natural-length", default=True, show_default=True, help="Go on past end-of-text, where the server can.")
@click.option("--pause", "pause_s", default=1.0, show_default=True, type=click.FloatRange(0, 3600),
              help="Seconds that the tool runs, between two turns.")
def turns(turns: int, tokens: int, scale: float, seed: int, tools: bool, fixed_length: bool, pause_s: float, **options: Any) -> None:
    """An agent's turns: wall time, first token and reuse of each."""
    from q27app.bench import turns as module

    run_bench(module, "turns", {"turns": turns, "tokens": tokens, "scale": scale, "seed": seed, "tools": tools,
                                "fixed_length": fixed_length, "pause_s": pause_s}, options)


@bench.command()
@server_options
@report_options
@click.option("--lengths", type=LISTS, default="4096,8192,16384,32768", show_default=True, metavar="N,N", help="Text lengths, tokens.")
@click.option("--depths", type=LISTS, default="0,25,50,75,100", show_default=True, metavar="P,P", help="Places of the fact, percent.")
@click.option("--trials", default=1, show_default=True, type=click.IntRange(1, 1000), help="Texts of each length and place.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1, 4096), help="Most tokens of an answer.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of texts and facts.")
def needle(lengths: list[int], depths: list[int], trials: int, tokens: int, seed: int, **options: Any) -> None:
    """A fact in long texts, asked for; no cache can help."""
    from q27app.bench import needle as module

    if not lengths or not depths or max(depths) > 100:
        raise UsageError("--lengths and --depths: expected at least one of each, depths from 0 to 100.")
    run_bench(module, "needle", {"lengths": lengths, "depths": depths, "trials": trials, "tokens": tokens, "seed": seed}, options)


@bench.command()
@server_options
@report_options
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(0.01, 100_000), help="How long.")
@click.option("--answers", default=0, show_default=True, type=click.IntRange(0), help="End after so many answers; 0: by time alone.")
@click.option("--streams", default=2, show_default=True, type=click.IntRange(1, 64), help="Agents at once.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1, 65536), help="Tokens of each answer.")
@click.option("--scale", default=0.5, show_default=True, type=click.FloatRange(0.01, 100), help="Size of system text and results.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the transcripts.")
def soak(minutes: float, answers: int, streams: int, tokens: int, scale: float, seed: int, **options: Any) -> None:
    """Agent turns for minutes or hours: errors, silence, growth, speed."""
    from q27app.bench import soak as module

    run_bench(module, "soak", {"seconds": minutes * 60, "answers": answers, "streams": streams, "tokens": tokens, "scale": scale,
                               "seed": seed}, options)


@bench.command()
@click.option("--url", metavar="URL", help="A server; default: the engine in this process, with --model.")
@click.option("--key", metavar="KEY", help="API key, or @FILE.")
@click.option("--model", "-m", metavar="M", help="Path, name in the models folder, or demo; with --url its name there.")
@click.option("--backend", metavar="auto|cuda|numpy", help="Where to compute.")
@click.option("--kv", metavar="K", help="KV format.")
@click.option("--prompt", "prompt_ids", metavar="1,2,3", help="Other ids than the canonical five.")
@click.option("--max-tokens", "-n", default=128, show_default=True, type=click.IntRange(1, 65536))
@click.option("--expect", metavar="FILE|MD5", help="Ids to compare with (commas or JSON), or an md5 of text or ids.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def canonical(url: str | None, key: str | None, model: str | None, backend: str | None, kv: str | None, prompt_ids: str | None,
              max_tokens: int, expect: str | None, as_json: bool) -> int:
    """The greedy text of five known ids: checksum, and first difference from what was expected.

    Exit code 1 if it differs.
    """
    from q27app.bench.canonical import PROMPT, compared
    from q27app.bench.stamp import make_stamp, stamp_lines
    from q27app.cli_generate import parse_ids

    prompt = parse_ids(prompt_ids, "--prompt") if prompt_ids else list(PROMPT)
    ids, md5 = _expected(expect)
    found = _from_server(url, key, model, prompt, max_tokens) if url else _from_engine(model, backend, kv, prompt, max_tokens)
    stamp = make_stamp(**found.pop("facts"))
    notes = found.pop("notes", [])
    result = {"bench": "canonical", "stamp": stamp, "prompt": prompt, **compared(found, ids, md5), "notes": notes}
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
    else:
        click.echo("\n".join([*stamp_lines(stamp), "", *(f"{name:<17} {result[name]}" for name in (
            "num_tokens", "md5_text", "md5_ids", "is_equal", "first_difference", "found", "expected") if name in result), *notes]))
        click.echo(json.dumps(result, ensure_ascii=False))
    return 1 if result.get("is_equal") is False else 0


def _expected(expect: str | None) -> tuple[list[int] | None, str | None]:
    from q27app.cli_generate import parse_ids

    if expect is None:
        return None, None
    if len(expect) == 32 and all(letter in "0123456789abcdefABCDEF" for letter in expect):
        return None, expect
    try:
        return parse_ids(Path(expect).read_text(encoding="utf-8"), expect), None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--expect {expect[:80]}: neither an md5 nor a file that can be read.") from error


def _from_server(url: str, key: str | None, model: str | None, prompt: list[int], count: int) -> dict[str, Any]:
    from q27app.bench.canonical import ask_server
    from q27app.bench.endpoint import open_endpoint
    from q27app.cli_tui import _where

    async def ask() -> dict[str, Any]:
        address, used_key = _where(url, key)
        async with open_endpoint(address, used_key, model or "") as endpoint:
            return {**await ask_server(endpoint, prompt, count), "facts": endpoint.facts}

    return asyncio.run(ask())


def _from_engine(model: str | None, backend: str | None, kv: str | None, prompt: list[int], count: int) -> dict[str, Any]:
    from q27app.cli_generate import events, start_engine, tokenizer_of
    from q27app.config import load_config
    from q27app.engine.request import Request, SamplingParams

    config = load_config({"model.path": model, "model.backend": backend, "model.kv": kv, "model.context": 2048})
    engine = start_engine(config)
    try:
        info = engine.status().model
        request = Request("canonical", tuple(prompt), SamplingParams(max_tokens=count, ignore_eos=True))
        ids = [token for event in events(engine, request) for token in event.tokens]
    finally:
        engine.close()
    try:
        text: str | None = tokenizer_of(config.model.path).decode(ids)
    except Q27Error:
        text = None
    facts = {"model": info.get("file"), "tier": info.get("tier"), "kv": info.get("kv_format"), "backend": info.get("backend"),
             "context": 2048}
    return {"ids": ids, "text": text, "facts": facts}
