"""nanovllm stages: list the seven stages that the engine grew through, and how to run them."""

import click

STAGES = {
    "s1_contiguous_cache": "each sequence reserves contiguous slots: some are wasted, and holes remain",
    "s2_block_manager": "blocks and block tables: no holes, but every step copies the history",
    "s3_paged_attention": "attention reads blocks tile by tile; a batch waits for its slowest request",
    "s4_continuous_batching": "a scheduler: requests join and leave at any time; chunks, preemption",
    "s5_cow_sampling": "reference counts and copy-on-write: n samples share their prompt's blocks",
    "s6_prefix_caching": "chained hashes: computed blocks are reused until they are evicted",
    "s7_cpu_offload": "a second tier on the host; load or recompute, whichever is cheaper",
}
HOW_TO_RUN = """\
  python -m stages 3 "Once upon a time"     run stage 3
  make diff STAGE=3                         see what it changes in stage 2
  make exercise STAGE=3                     write it yourself
  stages/README.md                          follow the path through them"""


@click.command()
def stages() -> int:
    """List the seven stages that this engine grew through, and how to run them."""
    click.echo("nanovllm grew through seven stages. Each one runs, and adds one idea to the previous stage:\n")
    for number, (name, idea) in enumerate(STAGES.items(), start=1):
        click.echo(f"  {number}  {name.split('_', 1)[1].replace('_', ' '):<20} {idea}")
    click.echo("\nThis package is stage 7, grown up. In the repository, you can run every stage:\n\n" + HOW_TO_RUN)
    return 0
