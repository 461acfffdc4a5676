"""Writes the held-out sets in the form that `q27app bench demo-eval` reads: q27app/data/demo_eval.jsonl.gz.

    python training/write_held_out.py [--count N]

One JSON object a line: task, split, thinking, tools, messages (without the last answer), check, expected (the last answer).
The same count and the same state of the repository, whose text is filler, give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from curriculum.example import Example, Step  # noqa: E402
from curriculum.held_out import held_out  # noqa: E402

DESTINATION = HERE.parent / "q27app" / "data" / "demo_eval.jsonl.gz"


def message(step: Step) -> dict:
    found: dict = {"role": step.role, "text": step.text}
    if step.reasoning is not None:
        found["reasoning"] = step.reasoning
    if step.calls:
        found["calls"] = [dict(call) for call in step.calls]
    return found


def line(task: str, split: str, example: Example) -> dict:
    messages = [] if example.system is None else [{"role": "system", "text": example.system}]
    messages += [message(step) for step in example.steps[:-1]]
    return {"task": task, "split": split, "thinking": example.steps[-1].reasoning is not None, "tools": list(example.tools),
            "messages": messages, "check": dict(example.check), "expected": message(example.steps[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, help="examples of each task and split; by default as many as held_out.py says")
    options = parser.parse_args()
    lines = [json.dumps(line(*item), ensure_ascii=False, separators=(",", ":")) for item in held_out(options.count)]
    DESTINATION.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0))
    print(f"{DESTINATION}: {len(lines)} examples, {DESTINATION.stat().st_size} bytes")


if __name__ == "__main__":
    main()
