"""The model card's loss curve and samples, from a finished run: `python -m models.training.card`.

It writes loss.svg and samples.json next to the checkpoint. Then `python -m stages.tools.prose` updates the card.
"""

import json
from pathlib import Path
from typing import Any

import click

from stages.s1_contiguous_cache import LLM, SamplingParams

FOLDER = Path(__file__).resolve().parents[1] / "storyteller"
PROMPTS = [
    "Once upon a time there was a little rabbit who",
    "Once upon a time there was a King who had three sons.",
    "There was once a poor woodcutter who lived",
    "In the middle of the forest stood a small house,",
    '"Good morning," said the fox.',
    "Reddy Fox was very hungry.",
    "The old woman opened the door and saw",
    "Long ago, when animals could talk,",
    "One day Dorothy and the Scarecrow",
    "Raggedy Ann sat up in her bed",
]


def generate_samples() -> list[dict[str, str]]:
    """Continue each prompt once. The seed is the prompt's index, and no sample is cherry-picked."""
    llm = LLM(FOLDER, dtype="float32")
    params = [SamplingParams(temperature=0.7, top_p=0.9, seed=seed, max_tokens=180) for seed in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    return [{"prompt": prompt, "text": each.outputs[0].text} for prompt, each in zip(PROMPTS, outputs, strict=True)]


def draw_curve(curve: list[dict[str, float]], path: Path) -> None:
    """Plot training and held-out loss against tokens, as an SVG whose bytes depend on the curve alone."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "storyteller"
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    figure.set_facecolor("white")
    millions = [point["tokens"] / 1e6 for point in curve]
    for name, color, label in (("train", "0.6", "training"), ("held_out", "0.1", "held-out books")):
        losses = [point[name] for point in curve]
        axes.plot(millions, losses, color=color, linewidth=2)
        axes.annotate(label, (millions[-1], losses[-1]), xytext=(6, 0), textcoords="offset points", color=color)
    axes.set(xlabel="million tokens", ylabel="loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


@click.command()
def main() -> None:
    """Draw the loss curve and write ten samples."""
    training: dict[str, Any] = json.loads((FOLDER / "training.json").read_text("utf-8"))
    draw_curve(training["curve"], FOLDER / "loss.svg")
    (FOLDER / "samples.json").write_text(json.dumps(generate_samples(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
