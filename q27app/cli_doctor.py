"""The command doctor."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from q27app.errors import EXIT_FAILED, EXIT_OK


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--strict", is_flag=True, help="Warnings are failures too.")
@click.option("--bundle", "bundle_file", type=click.Path(path_type=Path), metavar="FILE", help="Write a redacted report.")
def doctor(as_json: bool, strict: bool, bundle_file: Path | None) -> int:
    """Say what is wrong with this machine, and how to fix it."""
    from q27app.setup.doctor import bundle, run_doctor

    findings = run_doctor()
    if bundle_file is not None:
        bundle_file.write_text(json.dumps(bundle(findings), indent=2) + "\n")
        click.echo(f"Wrote {bundle_file}: findings and names of variables; no keys, no prompts.", err=True)
    if as_json:
        click.echo(json.dumps({"schema": 1, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            click.echo(f"{finding.severity.upper():<8} {finding.id:<20} {finding.evidence}")
            if finding.fix and finding.severity != "ok":
                click.echo(f"{'':<8} fix: {finding.fix}")
    bad = {"failure", "warning"} if strict else {"failure"}
    return EXIT_FAILED if any(finding.severity in bad for finding in findings) else EXIT_OK
