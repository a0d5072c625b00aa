"""Continue texts: stream the first story, or search beams, print the others, then one line about the pool."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

from .beam_search import BeamSearchParams
from .config import EngineConfig
from .llm import LLM
from .outputs import RequestOutput
from .sampling import SamplingParams

PROMPTS = [
    '"Good morning," said the fox',
    "The wolf knocked at the door",
    "Once upon a time there was a princess",
    "The King had three sons, and the youngest",
    "Dorothy looked at the Scarecrow",
    "Long ago, when animals could talk,",
]


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: six beginnings)")
    add_flags(parser, EngineConfig)
    of_request = add_flags(parser, SamplingParams)
    parser.add_argument("--beam-width", type=int, help="print the most likely text that this many beams find")
    parser.set_defaults(temperature=0.7, top_p=0.9, max_tokens=120, kv_cache_tokens=2048, seed=2)  # see the model card
    options = vars(parser.parse_args(argv))
    prompts, width = options.pop("prompts") or PROMPTS, options.pop("beam_width")
    try:
        params = SamplingParams(**{name: options.pop(name) for name in of_request})
        llm = LLM(**options)
        beams = None if width is None else BeamSearchParams(width, params.max_tokens, params.ignore_eos)
        stream = iter(llm.beam_search(prompts, beams)) if beams else llm.stream(prompts, params)
    except ValueError as error:
        parser.error(str(error))
    outputs = show(stream)
    print(summary(llm, outputs))
    return 1 if any(output.error for output in outputs) else 0


def add_flags(parser: argparse.ArgumentParser, options: type) -> list[str]:
    """Add a flag for each option() of a dataclass: --max-num-seqs for max_num_seqs. Return their names."""
    flags = [field for field in fields(options) if field.metadata]
    for field in flags:
        kind = (*get_args(field.type), field.type)[0]  # int for int | None
        help = field.metadata["help"] + (" (default: %(default)s)" if field.default is not None else "")
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default, help=help)
    return [field.name for field in flags]


def show(stream: Iterator[RequestOutput]) -> list[RequestOutput]:
    """Print the first story as it comes, and the others when all have finished. Return their outputs."""
    latest, num_printed = {}, 0
    for output in stream:
        latest[int(output.request_id)] = output
        if output.request_id == "0":
            text = f"{output.prompt}{output.outputs[0].text}"
            print(text[num_printed:], end="", flush=True)
            num_printed = len(text)
    outputs = [output for _, output in sorted(latest.items())]
    for index, output in enumerate(outputs):
        completion = output.outputs[0]
        print(f"{output.prompt}{completion.text}" if index else "", end="")
        print(f"  [{len(completion.token_ids)} tokens, {output.error or completion.finish_reason}]\n")
    return outputs


def summary(llm: LLM, outputs: list[RequestOutput]) -> str:
    """Return one line: the speed of the run, and the pool at its peak."""
    served = [output for output in outputs if not output.error]
    if not served:
        return "nothing was served"
    num_tokens = sum(len(completion.token_ids) for output in served for completion in output.outputs)
    start = served[0].metrics.arrival_time
    seconds = max(output.metrics.finished_time for output in served) - start
    first_token = served[0].metrics.first_token_time - start
    pool = llm.peak
    return (
        f"{num_tokens / seconds:.0f} tokens/s, first token {first_token * 1000:.0f} ms, KV slots: {pool.held:,} of "
        f"{pool.num_slots:,} reserved, {pool.used:,} used ({pool.used / pool.held:.0%}) |{pool.strip(32)}|, "
        + counts(llm)
    )


def counts(llm: LLM) -> str:
    """Return the counts that this stage is about, since the start."""
    preemptions, copies = llm.llm_engine.scheduler.num_preemptions, llm.kv_cache.num_blocks_copied
    return f"preemptions: {preemptions}, blocks copied: {copies}"


if __name__ == "__main__":
    sys.exit(main())
