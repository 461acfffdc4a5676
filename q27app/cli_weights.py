"""Commands on model files: convert, inspect, synth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from q27app.errors import UsageError

if TYPE_CHECKING:
    from q27app.weights.convert import ConvertReport

OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option("--tier", default="default", show_default=True, metavar="T",
              help="default, q4s, q5f, q6, q6f, q6k or q8; f32 and f16 keep every matrix unquantised.")
@click.option("--mtp", metavar="FILE", help="GGUF file with the draft layer, where SRC is a GGUF without it.")
@click.option("--generation", type=click.Choice(["3.6", "3.8"]), help="Whose recipe to use; default: from the model's name.")
@OVERWRITE
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def convert(source: str, destination: str, tier: str, mtp: str | None, generation: str | None, overwrite: bool,
            as_json: bool) -> None:
    """Convert a Hugging Face folder or a GGUF file to .q27."""
    from q27app.cli_progress import Progress
    from q27app.weights.convert import convert as convert_weights

    if not Path(source).exists():
        raise UsageError(f"{source} does not exist.", "Give a Hugging Face folder or a GGUF file.")
    progress = Progress("converted")
    try:
        report = convert_weights(source, destination, tier, mtp, progress, generation, overwrite)
    finally:
        progress.close()
    click.echo(json.dumps(_report(report)) if as_json else _report_text(report))


def _report(report: ConvertReport) -> dict:
    return {
        "path": str(report.path), "tier": report.tier, "generation": report.generation, "weights": report.num_weights,
        "source_bytes": report.source_bytes, "file_bytes": report.file_bytes, "seconds": round(report.seconds, 3),
        "tensors": [{"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape),
                     "relative_rms_error": tensor.error} for tensor in report.tensors],
    }


def _report_text(report: ConvertReport) -> str:
    from q27app.cli_progress import human_bytes

    seconds = max(report.seconds, 1e-9)
    lines = [f"{report.path}: {human_bytes(report.file_bytes)}, tier {report.tier}, generation {report.generation}; "
             f"{report.num_weights / 1e6:.1f} million weights in {report.seconds:.1f} s "
             f"({report.num_weights / seconds / 1e6:.0f} million/s, {human_bytes(report.source_bytes / seconds)}/s read)",
             "Worst tensors (rms of the error over rms of the weights):"]
    lines += [f"  {tensor.error:.4f}  {tensor.dtype:<8} {tensor.name}" for tensor in report.worst(8)]
    return "\n".join(lines)


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def inspect(file: str, as_json: bool) -> None:
    """Show what a .q27 file holds.

    Configuration, tier, tensor table and sizes. FILE may also be a model's name, or demo.
    """
    from q27app.paths import resolve_model
    from q27app.weights.container import open_container
    from q27app.weights.inspect import describe, render_description

    with open_container(resolve_model(file)) as container:
        description = describe(container)
    click.echo(json.dumps(description) if as_json else render_description(description), nl=as_json)


@click.command()
@click.argument("destination", metavar="DST")
@click.option("--size", default="nano", show_default=True, metavar="S", help="nano, 27b, or WIDTHxLAYERS[,key=number...].")
@click.option("--wiring", default="chain", show_default=True, type=click.Choice(["chain", "dense"]),
              help="chain: token t is followed by t + 1; dense: random at natural scale.")
@click.option("--tier", default="q4s", show_default=True, metavar="T")
@click.option("--accept", default=0.8, show_default=True, metavar="P", help="Share of tokens that the draft head gets right.")
@click.option("--seed", default=0, show_default=True, metavar="S")
@OVERWRITE
def synth(destination: str, size: str, wiring: str, tier: str, accept: float, seed: int, overwrite: bool) -> None:
    """Write a constructed checkpoint for tests and measurements.

    Its weights mean nothing; the greedy text of a chain is known.
    """
    from q27app.cli_progress import Progress, human_bytes
    from q27app.weights.synthetic import synthesize

    progress = Progress("written")
    try:
        path = synthesize(destination, size, wiring, tier, accept, seed, progress, overwrite)
    finally:
        progress.close()
    click.echo(f"{path}: {human_bytes(path.stat().st_size)}")
