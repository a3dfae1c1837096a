"""The demo's loss curve as a picture."""

from __future__ import annotations

import math
from pathlib import Path


def plot_losses(path: Path, losses: list[float], *, vocabulary: int, held_out: float) -> None:
    """Write a PNG of the training loss by step, with ln(vocabulary), 60% of it, and the held-out loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training loss")
    axes.plot(steps, _smooth(losses), color="#08519c", linewidth=2, label="the same, smoothed")
    axes.plot([len(losses)], [held_out], "o", color="#d94801", label=f"held-out loss {held_out:.3f}")
    ceiling = math.log(vocabulary)
    for height, label in ((ceiling, f"ln({vocabulary:,})"), (0.6 * ceiling, "60% of it")):
        axes.axhline(height, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(label, (0.995, height), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="grey")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.set_title("A GPT learns the Python standard library")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def _smooth(values: list[float], decay: float = 0.8) -> list[float]:
    """An exponential mean, corrected for its start as Adam's moments are."""
    mean, smooth = 0.0, []
    for count, value in enumerate(values, start=1):
        mean = decay * mean + (1 - decay) * value
        smooth.append(mean / (1 - decay**count))
    return smooth
