"""Numbers and tables in the READMEs, from stages/results.json: `python -m stages.figures` writes them, --check compares.

Nothing measured is typed by hand. Prose holds two kinds of marks, which a code host does not show:

    <!-- n: predict.s1.cache_at_16:.1f -->4.2<!-- / -->     one number: a path into results.json, and its format
    <!-- figures: stages --> ... <!-- /figures -->          a block made by the function of that name below

results.json is written by `python -m stages.scoreboard`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.chaintools import added_lines, load

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("stages/results.json")
STORYTELLER = ROOT / "models" / "storyteller"
NUMBER = re.compile(r"(<!-- n: ([\w.]+)(?::([^ ]+))? -->).*?(<!-- / -->)", re.DOTALL)
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def stale(root: Path = ROOT) -> list[str]:
    """The prose files, relative to `root`, whose numbers are not those of results.json."""
    return [str(path.relative_to(root)) for path in prose_files(root) if render(path, root) != path.read_text("utf-8")]


def write(root: Path = ROOT) -> list[str]:
    """Bring the numbers of all prose files up to date; returns those that changed."""
    changed = stale(root)
    for name in changed:
        (root / name).write_text(render(root / name, root), encoding="utf-8")
    return changed


def prose_files(root: Path) -> list[Path]:
    folders = [root, root / "stages", *sorted((root / "stages").glob("s[0-9]*")), root / "nanovllm"]
    folders += [root / "models" / "storyteller"]
    return [folder / "README.md" for folder in folders if (folder / "README.md").exists()]


def render(path: Path, root: Path) -> str:
    """The text of a prose file with its numbers filled in. Raises ValueError for a mark that names nothing."""
    results = read(root / RESULTS) | {"facts": facts(root)}

    def number(match: re.Match[str]) -> str:
        start, key, spec, end = match.groups()
        return start + format(look_up(results, key, path), spec or "") + end

    def block(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"{path}: no function makes the block {name!r}")
        return start + BLOCKS[name](results) + end

    return BLOCK.sub(block, NUMBER.sub(number, path.read_text("utf-8")))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def facts(root: Path) -> dict[str, float]:
    """What is counted, not measured: always current."""
    model = read(root / "models/storyteller/config.json")
    heads_and_sizes = model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    bytes_per_token = 2 * heads_and_sizes * 4  # a key and a value, float32
    weight_bytes = (root / "models/storyteller/model.safetensors").stat().st_size * 2  # bfloat16 in the file
    return {
        "bytes_per_token": bytes_per_token,
        "texts_per_weights": weight_bytes / (bytes_per_token * model["max_position_embeddings"]),
        "s1_lines": added_lines(load(root).stages[0]),
        "million_parameters": weight_bytes / 4e6,
    }


def look_up(results: dict[str, Any], key: str, path: Path) -> Any:
    value: Any = results
    for part in key.split("."):
        if part not in value:
            raise ValueError(f"{path}: {RESULTS} has no {key}")
        value = value[part]
    return value


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    text = [("|" + "|".join(cells) + "|") if cells is lines[1] else ("| " + " | ".join(cells) + " |") for cells in lines]
    return "\n".join(text) + "\n"


def run_block(results: dict[str, Any]) -> str:
    """What `make run` prints, first story and last line."""
    return "```text\n" + results["run"]["screen"] + "\n```\n"


IDEAS = {  # the chain of stages: name, what it adds
    "1, contiguous cache": "one pool; each sequence reserves its slots in one piece",
    "2, block manager": "blocks, block tables, a free list",
    "3, paged attention": "attention reads blocks where they lie, all sequences at once",
    "4, continuous batching": "a scheduler: admission at every step, chunked prefill, preemption",
    "5, copy-on-write": "samples and beams that share blocks until they differ",
    "6, prefix caching": "blocks found again by the hash of what they hold",
    "7, CPU offload": "a second tier: swap blocks out and in",
}


def stages_block(results: dict[str, Any]) -> str:
    """The table of the chain: idea, lines in the diff, measured effect."""
    stages = load(ROOT).stages
    rows = []
    for number, (name, idea) in enumerate(IDEAS.items()):
        if number < len(stages):
            stage = stages[number]
            link = f"[{name}]({stage.folder.relative_to(ROOT)}/README.md)"
            rows.append([link, idea, f"{added_lines(stage):,}", EFFECTS[stage.key](results)])
        else:
            rows.append([name, idea, "to come", "to come"])
    return table(["stage", "idea", "lines added", "measured effect"], rows)


def effect_s1(results: dict[str, Any]) -> str:
    """What the cache buys, and what it leaves empty, as shares of what is reserved."""
    gain = results["predict"]["s1"]["cache_at_990"]
    runs = results["scoreboard"].values()
    empty = [run["wasted_bytes"] / run["held_bytes"] for run in runs]
    return f"token 990 comes {gain:.0f} times sooner; {min(empty):.0%} to {max(empty):.0%} of what is reserved is empty"


EFFECTS: dict[str, Callable[[dict[str, Any]], str]] = {"s1": effect_s1}


def scoreboard_block(results: dict[str, Any]) -> str:
    return table(SCORE_HEADER, [score_row(name, row) for name, row in results["scoreboard"].items()])


SCORE_HEADER = ["stage", "seats", "steps", "tokens computed", "tokens/s", "first token", "held", "used", "wasted inside"]


def score_row(name: str, row: dict[str, Any]) -> list[str]:
    """One run of the scoreboard's workload; the pool at the moment when most of it was used."""
    mib = {key: f"{row[key] / 2**20:.1f} MiB" for key in ("held_bytes", "used_bytes", "wasted_bytes")}
    return [
        name,
        str(row["seats"]),
        f"{row['steps']:,}",
        f"{row['tokens_computed']:,}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['first_token_seconds'] * 1000:.0f} ms",
        *mib.values(),
    ]


def machine_block(results: dict[str, Any]) -> str:
    return f"Measured on {results['machine']}.\n"


def answers_block(stage: str) -> Callable[[dict[str, Any]], str]:
    """The lesson's questions with the measured answers, folded."""

    def block(results: dict[str, Any]) -> str:
        folded = "<details><summary>{question}</summary>\n\n{answer}\n\n</details>\n"
        return "".join(folded.format(**entry) for entry in results["predict"][stage]["answers"])

    return block


def training_block(results: dict[str, Any]) -> str:
    """The model card's table of a training run."""
    run = read(STORYTELLER / "training.json")
    settings, last = run["settings"], run["curve"][-1]
    rows = [
        ["held-out loss", f"{last['held_out']:.2f} nats a token, on two books that were never trained on"],
        ["training loss", f"{last['train']:.2f} nats a token, over the last steps"],
        ["tokens", f"{last['tokens'] / 1e6:.0f} million, {last['tokens'] / run['epoch_tokens']:.1f} epochs"],
        ["rows", f"{settings['short_row']} tokens for the first {settings['short_share']:.0%}, then full ones"],
        ["batch", f"{settings['batch_tokens']:,} tokens"],
        ["peak learning rate", f"Muon {settings['matrix_learning_rate']}, AdamW {settings['learning_rate']}; cosine"],
        ["weight decay, dropout", f"{settings['weight_decay']} on the matrices, {settings['dropout']}"],
    ]
    return table(["", ""], rows)


def samples_block(results: dict[str, Any]) -> str:
    """The model card's samples: the beginning in bold, what the model wrote after it."""
    samples = read(STORYTELLER / "samples.json")
    stories = (f"**{sample['prompt']}**{sample['text']}" for sample in samples)
    return "\n\n".join("> " + story.strip().replace("\n", "\n>\n> ") for story in stories) + "\n"


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": run_block,
    "stages": stages_block,
    "training": training_block,
    "samples": samples_block,
    "scoreboard": scoreboard_block,
    "machine": machine_block,
    "answers_s1": answers_block("s1"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.figures", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a number is not current")
    args = parser.parse_args(argv)
    names = stale() if args.check else write()
    for name in names:
        print(f"{name}: {'numbers are not those of ' + str(RESULTS) if args.check else 'brought up to date'}")
    return 1 if args.check and names else 0


if __name__ == "__main__":
    sys.exit(main())
