"""Run vLLM's own examples with `nanovllm` in place of `vllm` in their text, and write nanovllm/docs/vllm-examples.md.

    python -m nanovllm.tests.vllm_examples PATH/TO/VLLM [NAME ...]   # a checkout of the tag that the page names

An offline example is a script that builds an engine. Each one runs on the shipped checkpoint, in a process without a
network, in an empty folder. One that fails must need something that NEEDS describes. With names, only these examples
run, and the other rows of the table stay as they are.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..checkpoints.chat_template import read_template
from ..options.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
STORYTELLER = ROOT / "models" / "storyteller"
PAGE = ROOT / "nanovllm" / "docs" / "vllm-examples.md"
BLOCK = re.compile(r"(?<=<!-- figures: vllm_examples -->\n).*?(?=<!-- /figures -->)", re.DOTALL)
HEAD = "| example | outcome | reason |\n|---|---|---|\n"
TIME_LIMIT = 300  # seconds
MAX_REASON = 150  # characters
NUM_POSITIONS = 16_384  # of the checkpoint: one example has a prompt of several thousand tokens
# With no network but loopback, which ranks need.
ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")

ENGINES = {"LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine"}
MODEL = re.compile(r"""(\bLLM\(\s*|\bmodel(?:_name|_path|_dir)?["']?\s*[=:]\s*)(["'])[\w.-]+/[\w.-]+\2""")
ERROR = re.compile(r"^(?:[\w.]+: )?[\w.]*(?:Error|Exception|error): .*", re.MULTILINE)
NOT_SERVED = re.compile(r"\d+ of \d+ requests were not served: .*")
NEEDS = {  # by a pattern in the text; the first match counts
    r"\bvllm\.entrypoints\b": "parts of vLLM's server",
    r"\bvllm\.v1\.[\w.]*\blogits_processor\b": "custom logits processors",
    r"\bspeculative_config\b": "speculative decoding",
    r"\b(AudioAsset|ImageAsset|VideoAsset|fetch_image|multi_modal_data|prithvi\w*)\b": "images, audio or video",
    r"\b(KVTransferConfig|flexkv)\b": "a KV connector",
    r"\b(ShardedStateLoader|sharded_state|tensorizer)\b": "sharded or tensorized checkpoints",
    r"\b(WeightTransferConfig|reload_weights)\b": "weights that change while the engine runs",
    r"\burlopen\(": "a download",
    r"\b(pipeline|data)_parallel_size=([2-9]|args)": "several devices",
    r"\benable_return_routed_experts\b": "a mixture of experts",
    r"\b(LoRARequest|enable_lora)\b": "LoRA",
    r"\.(classify|score|encode|reward)\(": "pooling other than embeddings",
    r"\bdimensions=": "embeddings of any size",
    r"\benable_prompt_embeds\b": "embeddings as prompts",
    r"\benable_trace_replay\b": "the replay of a trace",
    r"\bpause_generation\b": "pausing an engine",
    r"load_format=\"mistral\"": "checkpoints in Mistral's own format",
    r"\"rope_type\": \"yarn\"": "YaRN",
}


class Outcome(NamedTuple):
    example: str  # its path below vLLM's examples/
    outcome: str
    reason: str = ""


def renamed(text: str) -> str:
    """Return a script with `nanovllm` in place of `vllm`.

    >>> renamed("from vllm.inputs import TextPrompt  # vllm_profile, nanovllm")
    'from nanovllm.inputs import TextPrompt  # vllm_profile, nanovllm'
    """
    return re.sub(r"\bvllm\b", "nanovllm", text)


def with_model(text: str, checkpoint: Path) -> str:
    """Return a script with this checkpoint in place of its models.

    >>> with_model('LLM(model="org/name")', Path("a"))
    'LLM(model="a")'
    """
    return MODEL.sub(lambda match: f"{match[1]}{match[2]}{checkpoint}{match[2]}", text)


def is_offline_example(text: str) -> bool:
    """Return whether a script takes a class of engines from vLLM.

    >>> is_offline_example("from vllm import LLM"), is_offline_example("from openai import OpenAI")
    (True, False)
    """
    nodes = [*ast.walk(ast.parse(text))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")]
    names = {each.name for node in imports for each in node.names}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "vllm"}
    return not names.isdisjoint(ENGINES)


def write_checkpoint(folder: Path) -> Path:
    """Write the shipped checkpoint with a chat template and with more positions, and return its folder."""
    folder.mkdir()
    for name in ("generation_config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"):
        (folder / name).symlink_to(STORYTELLER / name)
    config = json.loads((STORYTELLER / "config.json").read_text()) | {"max_position_embeddings": NUM_POSITIONS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(read_template("plain") or "")
    return folder


def run(name: str, text: str, checkpoint: Path) -> Outcome:
    """Run the text of an example, and return how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").mkdir()
        (Path(folder) / EngineConfig.model).symlink_to(checkpoint)
        script = Path(folder) / Path(name).name
        script.write_text(with_model(renamed(text), checkpoint))
        command = [*ALONE, sys.executable, script.name]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, timeout=TIME_LIMIT, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, "fails", f"it runs for more than {TIME_LIMIT} seconds")
    unserved = NOT_SERVED.search(done.stderr)
    if done.returncode == 0 and not unserved:
        return Outcome(name, "runs")
    errors = [unserved[0]] if unserved else ERROR.findall(done.stderr) or [f"exit status {done.returncode}"]
    error = errors[-1].replace(str(checkpoint), "the checkpoint").replace(f"{folder}/", "")
    return Outcome(name, outcome_of(text), reason(error))


def outcome_of(text: str) -> str:
    """Return what an example that does not run needs, or "fails" if it needs nothing that nanovllm lacks."""
    return next((f"needs {need}" for pattern, need in NEEDS.items() if re.search(pattern, text)), "fails")


def reason(error: str) -> str:
    """Return an error without the file that it names, short enough for a table.

    >>> reason("ValueError: a | b"), reason("ImportError: no a (/b/c.py)"), len(reason("a" * 1000))
    ('ValueError: a / b', 'ImportError: no a', 150)
    """
    error = re.sub(r" \(/\S+\)$", "", error.replace("|", "/"))
    return error if len(error) <= MAX_REASON else error[: MAX_REASON - 3] + "..."


def block(outcomes: Sequence[Outcome]) -> str:
    """Return a sentence with the number of examples that run, and the table."""
    rows = "".join(f"| {each.example} | {each.outcome} | {each.reason} |\n" for each in outcomes)
    return f"{number_that_run(outcomes)} examples run.\n\n{HEAD}{rows}"


def number_that_run(outcomes: Sequence[Outcome]) -> str:
    """Return how many examples run.

    >>> number_that_run([Outcome("a.py", "runs"), Outcome("b.py", "needs LoRA")])
    '1 of 2'
    """
    return f"{sum(each.outcome == 'runs' for each in outcomes)} of {len(outcomes)}"


def outcomes_on(page: str) -> list[Outcome]:
    """Return the rows of the table on a page."""
    rows = page.partition(HEAD)[2].partition("<!-- /figures -->")[0].splitlines()
    return [Outcome(*(cell.strip() for cell in row.split("|")[1:-1])) for row in rows]


def examples(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each offline example in the folder."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if is_offline_example(text):
            yield path.relative_to(folder).as_posix(), text


def main(source: str, *names: str) -> int:
    """Run the examples of a checkout, and write the table. Return 1 if one fails that should run."""
    page = PAGE.read_text(encoding="utf-8")
    outcomes = {each.example: each for each in outcomes_on(page) if names}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder) / "storyteller")
        for name, text in examples(Path(source) / "examples"):
            if not names or name in names:
                outcomes[name] = run(name, text, checkpoint)
                print(*outcomes[name], sep=" | ", flush=True)
    rows = [outcomes[name] for name in sorted(outcomes)]
    PAGE.write_text(BLOCK.sub(lambda _: block(rows), page), encoding="utf-8")
    return int(any(each.outcome == "fails" for each in rows))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
