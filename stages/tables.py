"""The tables and other blocks that the READMEs take from results: one function for each, by name in BLOCKS."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
STORYTELLER = ROOT / "models" / "storyteller"
Results = dict[str, Any]  # what stages/results.json holds


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines) + "\n"


def run_block(results: Results) -> str:
    """What `make run` prints, first story and last line."""
    return "```text\n" + results["run"]["screen"] + "\n```\n"


def scoreboard_block(results: Results) -> str:
    return score_table(results["scoreboard"])


def scoreboard_of(number: int) -> Callable[[Results], str]:
    """For a lesson: the rows of its stage, and of the stage before."""

    def block(results: Results) -> str:
        wanted = (f"s{number - 1},", f"s{number},")
        return score_table({name: row for name, row in results["scoreboard"].items() if name.startswith(wanted)})

    return block


class Column(NamedTuple):
    """A number of the scoreboard: its heading, its key in a row of results.json, and how it is written."""

    name: str
    key: str
    show: Callable[[Any], str]


def mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


COLUMNS = (  # the pool's bytes are those of the moment when most of it was used
    Column("seats", "seats", "{:.0f}".format),
    Column("steps", "steps", "{:,.0f}".format),
    Column("tokens computed", "tokens_computed", "{:,.0f}".format),
    Column("tokens/s", "tokens_per_second", "{:.0f}".format),
    Column("TTFT", "first_token_seconds", lambda s: f"{1000 * s:.0f} ms" if s < 1 else f"{s:.1f} s"),
    Column("promised", "promised_bytes", mib),
    Column("held", "held_bytes", mib),
    Column("used", "used_bytes", mib),
    Column("wasted", "wasted_bytes", mib),
    Column("blocks", "blocks", "{:,.0f}".format),
    Column("blocks copied", "blocks_copied", "{:,.0f}".format),
    Column("blocks swapped", "blocks_swapped", "{:,.0f}".format),
)


def score_table(rows: dict[str, dict[str, Any]]) -> str:
    """A line a run of the workload. A column that no row has is left out; a dash stands for what one does not have."""
    columns = [column for column in COLUMNS if any(column.key in row for row in rows.values())]
    lines = [[name, *(c.show(row[c.key]) if c.key in row else "-" for c in columns)] for name, row in rows.items()]
    return table(["stage", *(column.name for column in columns)], lines)


def serving_block(results: Results) -> str:
    """What serving.py measured: stages 3 and 4 from a small pool; transformers, and stage 4 with room for all."""
    serving = results["serving"]
    small = {"s3": "s3, a pool of 2,048", "s4": "s4, a pool of 2,048"}
    roomy = {
        "s4": "s4, a pool of 8,192",
        "generate": "transformers `generate`, one static batch",
        "generate_batch": "transformers `generate_batch`, continuous",
    }
    rows = {text: serving[name] for name, text in small.items()}
    rows |= {text: serving["peers"][name] for name, text in roomy.items() if name in serving.get("peers", {})}
    failed = "".join(f"\n{name} failed: {row['error']}.\n" for name, row in rows.items() if "error" in row)
    return score_table({name: row for name, row in rows.items() if "error" not in row}) + failed


def samples_of_one_prompt_block(results: Results) -> str:
    """Several outputs of one prompt: as requests of their own, as samples, as beams."""
    runs = results["predict"]["s5"]["runs"]
    names = {"requests": "s4, 8 requests", "samples": "s5, n = 8", "beams": "s5, a beam of 4"}
    return score_table({text: runs[name] for name, text in names.items()})


def sharing_block(results: Results) -> str:
    """What sharing.py measured: requests with a common prefix and without, each with the cache off and on."""
    shared, unshared = results["sharing"]["shared"], results["sharing"]["unshared"]
    rows = []
    for name, text in (("off", "without"), ("on", "with")):
        waits = [f"{shared[f'{which}_{name}_seconds']:.2f} s" for which in ("median", "last")]
        rows.append([f"31 requests, a common prefix of 512: {text}", f"{shared[f'tokens_{name}']:,}", *waits, "-"])
    for name, text in (("off", "without"), ("on", "with")):
        speed = f"{unshared[f'tokens_per_second_{name}']:.0f}"
        rows.append([f"32 requests, nothing in common: {text}", f"{unshared['tokens_computed']:,}", "-", "-", speed])
    return table(["the cache", "tokens computed", "TTFT, median", "TTFT, the last", "tokens/s"], rows)


def swapping_block(results: Results) -> str:
    """What swapping.py measured: three policies on two loads."""
    keys = ("steps", "tokens_computed", "computed_twice", "preemptions", "swaps", "blocks_swapped")
    rows = []
    for load in ("usual", "crowded"):
        for policy in ("recompute", "swap", "auto"):
            run = results["swapping"][load][policy]
            rows.append([f"{load}: {policy}", *(f"{run[key]:,}" for key in keys), f"{run['tokens_per_second']:.0f}"])
    names = ["steps", "tokens computed", "of these twice", "preemptions", "swaps", "blocks swapped", "tokens/s"]
    return table(["load: policy", *names], rows)


def machine_block(results: Results) -> str:
    return f"Measured on {results['machine']}.\n"


def answers_block(stage: str) -> Callable[[Results], str]:
    """The lesson's questions with the measured answers, folded."""

    def block(results: Results) -> str:
        folded = "<details><summary>{question}</summary>\n\n{answer}\n\n</details>\n"
        return "".join(folded.format(**entry) for entry in results["predict"][stage]["answers"])

    return block


DECODE_COLUMNS = (
    Column("s1", "s1_ms", "{:.1f} ms".format),
    Column("s2", "s2_ms", "{:.1f} ms".format),
    Column("s3", "s3_ms", "{:.1f} ms".format),
    Column("s3 against s2", "s3_over_s2", "{:.2f}".format),
    Column("s3 against s1", "s3_over_s1", "{:.2f}".format),
    Column("must read", "bytes", lambda size: f"{size / 1e6:.0f} MB"),
    Column("with the copy", "moved_bytes", lambda size: f"{size / 1e6:.0f} MB"),
    Column("s1, of the bandwidth", "s1_of_bandwidth", "{:.0%}".format),
    Column("s2, of it", "s2_of_bandwidth", "{:.0%}".format),
    Column("s3, of it", "s3_of_bandwidth", "{:.0%}".format),
)


def decode_table(cases: list[dict[str, Any]]) -> str:
    """A line a case of decode.py: batch and context, then what a step took."""
    lines = [[f"{c['batch']} x {c['context']:,}", *(col.show(c[col.key]) for col in DECODE_COLUMNS)] for c in cases]
    return table(["batch x context", *(column.name for column in DECODE_COLUMNS)], lines)


def decode_block(results: Results) -> str:
    """Every case of decode.py: the storyteller's shape in float32, the others folded."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in sorted(results["decode"]["cases"].values(), key=lambda case: (case["context"], case["batch"])):
        groups.setdefault((case["model"], case["dtype"]), []).append(case)
    shown = decode_table(groups.pop(("storyteller", "float32")))
    folded = "\n<details><summary>{}, {}</summary>\n\n{}\n</details>\n"
    return shown + "".join(folded.format(*name, decode_table(cases)) for name, cases in sorted(groups.items()))


def decode_gain_block(results: Results) -> str:
    """Where stage 3's gain over stage 2 ends, in each dtype."""
    return "".join(f"- {dtype}: {text}.\n" for dtype, text in sorted(results["decode"]["gain"].items(), reverse=True))


def training_block(results: Results) -> str:
    """The model card's table of a training run."""
    run = json.loads((STORYTELLER / "training.json").read_text("utf-8"))
    settings, last = run["settings"], run["curve"][-1]
    (shipped,) = [point for point in run["curve"] if point["tokens"] == run["shipped_tokens"]]
    is_lowest = shipped["held_out"] == min(point["held_out"] for point in run["curve"])
    model = json.loads((STORYTELLER / "config.json").read_text("utf-8"))
    held_out = tomllib.loads((STORYTELLER / "recipe.toml").read_text("utf-8"))["held_out"]
    heads = f"{model['num_attention_heads']} heads of {model['head_dim']}, {model['num_key_value_heads']} KV heads"
    rows = [
        ["shipped", f"the state after {millions(shipped)}" + ", the lowest held-out loss" * is_lowest],
        ["held-out loss", f"{shipped['held_out']:.2f} nats a token, on books never trained on: {', '.join(held_out)}"],
        ["training loss", f"{shipped['train']:.2f} nats a token, over the steps before"],
        ["last state", f"held-out loss {last['held_out']:.2f}, training loss {last['train']:.2f}"],
        ["whole run", f"{millions(last)}, {last['tokens'] / run['epoch_tokens']:.1f} epochs"],
        ["shape", f"{model['num_hidden_layers']} layers, hidden {model['hidden_size']}, {heads}"],
        ["", f"MLP {model['intermediate_size']}, vocabulary {model['vocab_size']:,}, tied embeddings"],
        ["context", f"{model['max_position_embeddings']:,} tokens"],
        ["rows", f"{settings['short_row']} tokens for the first {settings['short_share']:.0%}, then full ones"],
        ["batch", f"{settings['batch_tokens']:,} tokens"],
        ["peak learning rate", f"Muon {settings['matrix_learning_rate']}, AdamW {settings['learning_rate']}"],
        ["schedule", f"{settings['warmup_steps']} steps of warm-up, a cosine; gradients clipped at {settings['clip']}"],
        ["weight decay, dropout, seed", f"{settings['weight_decay']}, {settings['dropout']}, {settings['seed']}"],
    ]
    return table(["", ""], rows)


def millions(point: dict[str, float]) -> str:
    return f"{point['tokens'] / 1e6:.1f} million tokens"


def baseline_block(results: Results) -> str:
    """The checkpoint beside the one that the first settings make: losses, and the commands behind them."""
    path = STORYTELLER / "comparison.json"
    scores = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if not {"storyteller", "baseline"} <= scores.keys():
        return "Not measured yet.\n"
    pair = {name: scores[name] for name in ("storyteller", "baseline")}
    windows = {score["window"] for score in pair.values()}
    if len(windows) > 1:
        raise ValueError(f"{path}: windows of {max(windows)} and of {min(windows)} tokens do not compare")
    rows = [
        [
            name,
            f"{score['nats_per_token']:.3f}",
            f"{score['bits_per_character']:.3f}",
            f"{score['shipped_tokens'] / 1e6:.1f} million",
        ]
        for name, score in pair.items()
    ]
    losses = table(["", "nats a token", "bits a character", "shipped after, tokens"], rows)
    (window,) = windows
    return losses + "\n```sh\n" + "\n".join(comparison_commands(pair, window)) + "\n```\n"


def comparison_commands(scores: dict[str, Any], window: int) -> list[str]:
    recipe, folder = "models/storyteller/recipe.toml", "runs/baseline"
    return [
        f"{scores['storyteller']['command']} --out models/storyteller",
        f"mkdir -p {folder} && cp {recipe} {folder}",
        f"{scores['baseline']['command']} --out {folder}",
        f"python -m models.training.evaluate models/storyteller {folder} --text folder --window {window} \\",
        "    --out models/storyteller/comparison.json",
    ]


def samples_block(results: Results) -> str:
    """The model card's samples: the beginning in bold, what the model wrote after it."""
    samples = json.loads((STORYTELLER / "samples.json").read_text("utf-8"))
    stories = (f"**{sample['prompt']}**{sample['text']}" for sample in samples)
    return "\n\n".join("> " + story.strip().replace("\n", "\n>\n> ") for story in stories) + "\n"


NUMBERS = range(1, 8)  # of the stages, whether they are there or not yet
BLOCKS: dict[str, Callable[[Results], str]] = {
    "run": run_block,
    "training": training_block,
    "baseline": baseline_block,
    "samples": samples_block,
    "scoreboard": scoreboard_block,
    "machine": machine_block,
    "serving": serving_block,
    "samples_of_one_prompt": samples_of_one_prompt_block,
    "sharing": sharing_block,
    "swapping": swapping_block,
    "decode": decode_block,
    "decode_gain": decode_gain_block,
    **{f"scoreboard_s{number}": scoreboard_of(number) for number in NUMBERS},
    **{f"answers_s{number}": answers_block(f"s{number}") for number in NUMBERS},
}
