"""Draws loss.csv of one or more parts of a run as docs/demo-loss.png.

    python training/plot_loss.py LOSS.csv... OUT.png

Needs matplotlib; a dotted line is where a part begins. Lines of the files: step, seconds, share, length, loss of the
main model, then one of each draft depth trained at that step.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def main(sources: list[str], target: str) -> None:
    parts = [[[float(value) for value in row] for row in csv.reader(open(source, encoding="utf-8"))]
             for source in sources]
    rows = [row for part in parts for row in part]
    by_length = defaultdict(list)
    for row in rows:
        by_length[int(row[3])].append((row[0], row[4]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for length, points in sorted(by_length.items()):
        left.plot(*zip(*points, strict=True), label=f"{length} tokens", linewidth=1)
    for depth in range(1, 5):
        points = [(row[0], row[4 + depth]) for row in rows if len(row) > 4 + depth]
        right.plot(*zip(*points, strict=True), label=f"draft depth {depth}", linewidth=1)
    for axis, title in ((left, "main model, by length of sequence"), (right, "draft layer, by depth")):
        axis.set(title=title, xlabel="step of 65,536 tokens", yscale="log")
        axis.grid(alpha=0.3)
        for part in parts[1:]:
            axis.axvline(part[0][0], color="black", linestyle=":", linewidth=1)
        axis.legend(fontsize=8)
    left.set_ylabel("weighted cross entropy, nats")
    figure.tight_layout()
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])
