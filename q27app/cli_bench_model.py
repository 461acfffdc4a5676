"""Benchmarks of the network itself: bench fidelity, kernels; and bench plot."""

from __future__ import annotations

from typing import Any

import click

from q27app.cli_bench import LISTS, bench, end_report, interruptible, journal_path, report_options, say_progress
from q27app.errors import Q27Error, UsageError


@bench.command()
@click.argument("report", metavar="REPORT")
@click.argument("picture", metavar="FILE.png")
def plot(report: str, picture: str) -> None:
    """Draw a report that was printed with --json, maybe on another machine."""
    from pathlib import Path

    from q27app.bench.plots import check_plot, draw, read_report

    check_plot(picture)
    draw(read_report(Path(report)), picture)
    click.echo(picture)


@bench.command()
@click.option("--model", "-m", metavar="M", help="Path, name in the models folder, or demo.")
@click.option("--backend", metavar="auto|cuda|numpy", help="Where to compute.")
@click.option("--kv", metavar="K", help="KV format; default: the backend's own.")
@click.option("--rows", type=LISTS, default="1,8,16", show_default=True, metavar="N,N", help="Rows of decode and verify passes.")
@click.option("--positions", type=LISTS, default="10", show_default=True, metavar="P,P", help="Where they stand.")
@click.option("--prefill", type=LISTS, default="2048", show_default=True, metavar="N,N", help="Rows of prefill passes; none: -.")
@report_options
def kernels(model: str | None, backend: str | None, kv: str | None, rows: list[int], positions: list[int], prefill: list[int],
            **options: Any) -> None:
    """Each stage: time, bandwidth, arithmetic, share of the measured peak.

    --plot draws the roofline.
    """
    from q27app.bench import kernels as module
    from q27app.bench.journal import Journal
    from q27app.bench.plots import check_plot
    from q27app.bench.stamp import make_stamp
    from q27app.config import load_config
    from q27app.kernels import open_backend
    from q27app.kernels.batch import MAX_DECODE_ROWS

    if not all(1 <= count <= MAX_DECODE_ROWS for count in rows) or not (rows or prefill) or 0 in prefill:
        raise UsageError(f"--rows {rows}, --prefill {prefill}: expected 1 to {MAX_DECODE_ROWS} rows and 1 or more.")
    check_plot(options["plot"])
    chosen = load_config({"model.path": model, "model.backend": backend, "model.kv": kv}).model
    say = say_progress(options["as_json"])
    opened = open_backend(chosen.backend)
    problem: BaseException | None = None
    try:
        settings = {"model": chosen.path, "kv": module.USUAL_KV[opened.name] if chosen.kv == "auto" else chosen.kv, "rows": rows,
                    "positions": positions if rows else [], "prefill": prefill, "backend": opened.name}
        with Journal(journal_path(options["out"], "kernels"), "kernels", settings, make_stamp(**_facts_of(chosen.path, settings))) as journal:
            say(str(journal.path))
            try:
                with interruptible():
                    _measure_kernels(opened, chosen.path, journal, settings, say)
            except (KeyboardInterrupt, Q27Error) as error:
                problem = error
            peaks = journal.rows.get("peaks", {"gb_per_s": None, "tflop_per_s": None})
            report = module.make_report(journal, {name: peaks[name] for name in ("gb_per_s", "tflop_per_s")})
            end_report(report, options, problem, journal.path)
    finally:
        opened.close()


def _measure_kernels(backend: Any, path: str, journal: Any, settings: dict[str, Any], say: Any) -> None:
    from q27app.bench import kernels as module
    from q27app.model.forward import load_model
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    if not journal.has("peaks"):
        if backend.name == "cuda":
            from dataclasses import asdict

            from q27app.kernels.peaks import measure_peaks

            journal.add("peaks", **asdict(measure_peaks(backend.device)))
        else:
            journal.add("peaks", **module.host_peaks())
    with open_container(resolve_model(path)) as container:
        loaded = load_model(backend, container, module.max_rows(settings))
    state = loaded.allocate_state(settings["kv"], 1, module.blocks_needed(settings), 16)
    module.measure(loaded, state, journal, settings, say)


def _facts_of(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the model's file says."""
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    with open_container(resolve_model(path)) as container:
        tier = str(container.metadata.get("q27app.tier", container.metadata.get("quant_policy", "")))
    return {"model": path, "tier": tier, "kv": settings["kv"], "backend": settings["backend"]}


def corpus_options(function: Any) -> Any:
    """Which texts."""
    for option in (
        click.option("--limit", default=20_000, show_default=True, type=click.IntRange(2, 100_000_000), help="Most tokens in all."),
        click.option("--window", default=4096, show_default=True, type=click.IntRange(2, 1 << 20), help="Most tokens of a text."),
        click.option("--held-out", is_flag=True, help="The bundled model's held-out conversations."),
        click.option("--tokens", "token_files", multiple=True, metavar="FILE", help="Token ids: a JSON array or {\"tokens\": [...]} a line."),
        click.option("--text", "text_files", multiple=True, metavar="FILE", help="Text, cut into pieces of --window tokens."),
    ):
        function = option(function)
    return function


def _documents(path: str, corpus: dict[str, Any]) -> tuple[list[Any], int]:
    """(documents, vocabulary) for a model's file."""
    from q27app.bench import corpus as texts
    from q27app.cli_generate import tokenizer_of
    from q27app.model.config import ModelConfig
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container

    with open_container(resolve_model(path)) as container:
        shapes = {name: tuple(tensor.shape) for name, tensor in container.tensors.items()}
        config, metadata = ModelConfig.from_metadata(container.metadata, shapes), dict(container.metadata)
    found = texts.from_tokens(corpus["token_files"])
    if corpus["text_files"] or corpus["held_out"]:
        tokenizer = tokenizer_of(path)
        found += texts.from_texts(corpus["text_files"], tokenizer, corpus["window"])
        found += texts.held_out(tokenizer, metadata) if corpus["held_out"] else []
    return texts.bounded(found, config.vocab_size, corpus["limit"], min(corpus["window"], config.max_context)), config.vocab_size


class _Network:
    """MODEL[,kv=K][,backend=B] as a feeder, opened for the time of a `with`."""

    def __init__(self, spec: str, window: int) -> None:
        model, *pairs = spec.split(",")
        given = dict(pair.partition("=")[::2] for pair in pairs)
        if not set(given) <= {"kv", "backend"} or not all(given.values()):
            raise UsageError(f"{spec}: expected MODEL[,kv=K][,backend=B].", "Such as demo,kv=fp8.")
        self.model, self.window = model, window
        self.kv, self.backend = given.get("kv", ""), given.get("backend", "auto")
        self.facts = {"model": model, **_facts_of(model, {"kv": self.kv, "backend": self.backend})}

    def __enter__(self) -> Any:
        from q27app.bench.feeder import CHUNK, Feeder
        from q27app.bench.kernels import USUAL_KV
        from q27app.kernels import open_backend
        from q27app.kernels.kv_formats import kv_format
        from q27app.paths import resolve_model
        from q27app.weights.container import open_container

        self._opened = open_backend(self.backend)
        try:
            self.kv = self.kv or USUAL_KV[self._opened.name]
            kv_format(self.kv)
            self.facts |= {"kv": self.kv, "backend": self._opened.name}
            with open_container(resolve_model(self.model)) as container:
                return Feeder.open(container, self.window, self._opened, self.kv, CHUNK)
        except BaseException:
            self._opened.close()
            raise

    def __exit__(self, *error: object) -> None:
        self._opened.close()


def _capture(spec: str, folder: Any, documents: list[Any], vocab_size: int, form: Any, say: Any) -> Any:
    """The capture of a network, made or completed."""
    from q27app.bench.captures import cost_bytes, fill_capture, make_capture

    say(f"{spec}: {len(documents)} texts, {sum(len(document.tokens) for document in documents):,} tokens; form {form} takes "
        f"{form.row_bytes(vocab_size):,} bytes a token, {cost_bytes(documents, vocab_size, form) / 1e9:.3f} GB in {folder}")
    network = _Network(spec, max(len(document.tokens) for document in documents))
    with network as feeder:
        capture = make_capture(folder, documents, vocab_size, form, network.facts)
        fill_capture(capture, feeder, documents, say)
    return capture


@bench.command()
@click.argument("model", metavar="MODEL[,kv=K,backend=B]")
@click.argument("folder", metavar="FOLDER")
@corpus_options
@click.option("--form", default="top256", show_default=True, metavar="exact|full|topK", help="How a row is kept.")
def capture(model: str, folder: str, form: str, **corpus: Any) -> None:
    """Keep what a network says on texts, to compare with later or elsewhere.

    exact: float32 logits; full: float16 log probabilities; topK: the K best and the mass of the rest. An interrupted
    capture goes on.
    """
    from pathlib import Path

    from q27app.bench.divergence import parse_form

    chosen = parse_form(form)
    documents, vocab_size = _documents(model.split(",")[0], corpus)
    with interruptible():
        done = _capture(model, Path(folder), documents, vocab_size, chosen, say_progress(False))
    click.echo(f"{folder}: {done.num_complete()} of {len(documents)} texts, form {chosen}")


@bench.command()
@click.option("--reference", required=True, metavar="MODEL[,...]|FOLDER", help="A model (NumPy unless it says backend=), or a capture.")
@click.option("--candidate", "given", multiple=True, required=True, metavar="MODEL[,kv=K,backend=B]|FOLDER", help="May be repeated.")
@corpus_options
@click.option("--form", default="", metavar="exact|full|topK", help="Of the reference's capture; default: exact to 16,384 ids, else top256.")
@click.option("--keep", metavar="FOLDER", help="Keep the reference's capture there; default: beside the journal, removed at the end.")
@click.option("--resamples", default=4000, show_default=True, type=click.IntRange(100, 1_000_000), help="Of the bootstrap.")
@report_options
def fidelity(reference: str, given: tuple[str, ...], form: str, keep: str | None, resamples: int, **options: Any) -> None:
    """KL divergence of tiers, KV formats and backends from a reference, with its tail.

    \b
    q27app bench fidelity --reference demo-f32.q27 --candidate demo --candidate demo,kv=fp8 --held-out
    q27app bench fidelity --reference captured/ --candidate qwen,backend=cuda,kv=fp8
    """
    import shutil
    from pathlib import Path

    from q27app.bench import fidelity as module
    from q27app.bench.captures import HEADER, open_capture
    from q27app.bench.divergence import Form, parse_form
    from q27app.bench.journal import Journal
    from q27app.bench.plots import check_plot
    from q27app.bench.stamp import make_stamp

    check_plot(options["plot"])
    if len(set(given)) < len(given) or any("|" in name for name in given):
        raise UsageError("--candidate: each must be another one, without |.")
    say, path = say_progress(options["as_json"]), journal_path(options["out"], "fidelity")
    is_captured = (Path(reference) / HEADER).exists()
    corpus = {name: options[name] for name in ("text_files", "token_files", "held_out", "limit", "window")}
    documents: list[Any] = []
    if is_captured:
        kept = open_capture(Path(reference))
        chosen, vocab_size = kept.form, kept.header["vocab_size"]
    else:
        documents, vocab_size = _documents(reference.split(",")[0], corpus)
        chosen = parse_form(form) if form else Form("exact") if vocab_size <= 16384 else Form("top", 256)
    settings = {"reference": reference, "form": str(chosen), "corpus": corpus if not is_captured else kept.header["corpus"]}
    problem: BaseException | None = None
    with Journal(path, "fidelity", settings, make_stamp(reference=reference)) as journal:
        say(str(journal.path))
        folder = Path(keep) if keep else path.with_suffix(".reference")
        try:
            with interruptible():
                if not is_captured:
                    spec = reference if "backend=" in reference else f"{reference},backend=numpy"
                    kept = _capture(spec, folder, documents, vocab_size, chosen, say)
                for candidate in given:
                    _compare(candidate, kept, documents, corpus, journal, say)
        except (KeyboardInterrupt, Q27Error) as error:
            problem = error
        end_report(module.make_report(journal, resamples), options, problem, journal.path)
        if not is_captured and not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _compare(candidate: str, kept: Any, documents: list[Any], corpus: dict[str, Any], journal: Any, say: Any) -> None:
    """Rows of one candidate: another capture of the same corpus, or a network that runs now."""
    from pathlib import Path

    from q27app.bench.captures import HEADER, encoded, open_capture
    from q27app.bench.fidelity import compare

    if not journal.missing(f"{candidate}|{number}" for number in range(len(kept.documents))):
        return
    if (Path(candidate) / HEADER).exists():
        other = open_capture(Path(candidate))
        if other.header["corpus"] != kept.header["corpus"] or other.header["vocab_size"] != kept.header["vocab_size"]:
            raise UsageError(f"{candidate} is a capture of another corpus or vocabulary than the reference.", "Capture the same texts.")
        compare(candidate, other.header["about"], kept, other.rows, journal, say)
        return
    if not documents:
        documents.extend(_documents(candidate.split(",")[0], corpus)[0])
    from q27app.bench.corpus import fingerprint

    if fingerprint(documents) != kept.header["corpus"]:
        raise UsageError(f"the texts given are not those of {kept.folder}.", "Give the same --text, --tokens, --held-out, --limit and --window.")
    network = _Network(candidate, max(len(document.tokens) for document in documents))
    with network as feeder:
        compare(candidate, network.facts, kept, lambda number: encoded(feeder, documents[number], kept.form, kept, number), journal, say)
