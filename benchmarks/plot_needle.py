"""Plots a result of benchmarks/needle.py: tokens a second of each chunk, and time to the first token, against the context.

Usage, from the repository root: python -m benchmarks.plot_needle RESULT.json docs/images/needle_h200.png
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path


def main() -> None:
    """Read the longest run and write the picture."""
    import matplotlib.pyplot as plt

    source, target = map(Path, sys.argv[1:])
    result = json.loads(source.read_text())
    run = max(result["runs"], key=lambda record: record["length"])
    # The last step is the end of the prompt, mostly shorter than a chunk.
    seconds = run["seconds"][: run["length"] // result["chunk"]]
    context = [result["chunk"] * (index + 1) for index in range(len(seconds))]
    figure, (rate, total) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    rate.plot(context, [result["chunk"] / second for second in seconds], color="#1f6f8b")
    rate.set(xlabel="context (tokens)", ylabel="tokens a second", ylim=(0, None), title="Each chunk of 8,192 tokens")
    total.plot(context, list(accumulate(seconds)), color="#b5512b")
    total.set(xlabel="prompt (tokens)", ylabel="seconds", ylim=(0, None), title="Time to the first token")
    for axes in (rate, total):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f}K")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
