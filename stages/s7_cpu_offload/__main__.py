"""python -m stages.s1_contiguous_cache "Once upon a time": stream a story, then say what it took of the pool."""

import argparse
import sys
from collections.abc import Iterator

from .config import POOL_SIZES, EngineConfig
from .flags import add_flags, flag_values
from .llama import ModelConfig
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
POOL_TOKENS, MAX_MODEL_LEN = 2048, 1024  # unless flags say otherwise: a pool small enough to be felt


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if all(getattr(args, size) is None for size in POOL_SIZES):
            if args.max_model_len is None:
                args.max_model_len = min(MAX_MODEL_LEN, ModelConfig.from_folder(args.model).max_position_embeddings)
            args.kv_cache_tokens = max(POOL_TOKENS, 2 * args.max_model_len)
        llm = LLM(**flag_values(EngineConfig, args))
        params = SamplingParams(**flag_values(SamplingParams, args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outputs = show(llm.stream(args.prompts or PROMPTS, params))
    print("\n" + summary(llm, outputs))
    if llm.llm_engine.cost_model:
        print(f"swap or recompute: {llm.llm_engine.cost_model}")
    return 1 if any(output.error for output in outputs) else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=sys.modules[__package__].__doc__)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to go on from; default: six beginnings")
    add_flags(parser, EngineConfig)
    add_flags(parser, SamplingParams)
    parser.set_defaults(temperature=0.7, top_p=0.9, max_tokens=120)
    return parser


def show(stream: Iterator[RequestOutput]) -> list[RequestOutput]:
    """Print the first story as it comes and the others whole, in order, once they have ended. Returns all of them."""
    finished: dict[int, RequestOutput] = {}
    num_shown, printed = 0, 0  # stories, and characters of the first
    for output in stream:
        index = int(output.request_id)
        if index == 0 and not output.error:
            text = (output.prompt or "") + output.outputs[0].text
            print(text[printed:], end="", flush=True)
            printed = len(text)
        if output.finished:
            finished[index] = output
        while num_shown in finished:
            print_ending(finished[num_shown])
            num_shown += 1
    return [finished[index] for index in sorted(finished)]


def print_ending(output: RequestOutput) -> None:
    """What is not on the screen yet: of the first story nothing is left, of the others all."""
    if output.error:
        print(f"error: {output.error}", file=sys.stderr)
    for completion in output.outputs:
        is_shown = output.request_id == "0" and completion.index == 0
        if not output.error and not is_shown:
            print(f"{output.prompt}{completion.text}", end="")
        print(f"  [{len(completion.token_ids)} tokens, {completion.finish_reason}]\n")


def summary(llm: LLM, outputs: list[RequestOutput]) -> str:
    """One line: how fast, and what it took of the pool when most of it was used."""
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
        f"{pool.num_slots:,} reserved, {pool.used:,} used ({pool.used / pool.held:.0%}) |{pool.strip(32)}|"
    )


if __name__ == "__main__":
    sys.exit(main())
