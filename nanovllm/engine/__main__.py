"""python -m stages.s1_contiguous_cache "Once upon a time": stream a story, then say what it took of the pool."""

import argparse
import sys

from .config import EngineConfig
from .console import run_command
from .flags import add_flags, flag_values
from .llm import LLM
from .sampling_params import SamplingParams
from .stories import PROMPTS, show, summary, with_small_pool


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: tell(parser().parse_args(argv)))


def tell(args: argparse.Namespace) -> int:
    """Tell the stories that the command line asks for. Returns the exit status."""
    try:
        llm = LLM(**with_small_pool(flag_values(EngineConfig, args)))
        params = SamplingParams(**flag_values(SamplingParams, args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outputs = show(llm.stream(args.prompts or PROMPTS, params))
    print("\n" + summary(llm, outputs))
    if llm.llm_engine.cost_model:
        print(f"load or recompute: {llm.llm_engine.cost_model}")
    return 1 if any(output.error for output in outputs) else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=sys.modules[__package__].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # the docstring is a list
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to go on from; default: six beginnings")
    add_flags(parser, EngineConfig)
    add_flags(parser, SamplingParams)
    parser.set_defaults(temperature=0.7, top_p=0.9, max_tokens=120)
    return parser


if __name__ == "__main__":
    sys.exit(main())
