"""nanovllm stages: which stages there are, and how to run them."""

from pathlib import Path

import click

STAGES = {
    "s1_contiguous_cache": "each sequence reserves its slots in one piece: holes inside, holes outside",
    "s2_block_manager": "blocks and block tables: no holes, but every step copies the history",
    "s3_paged_attention": "attention reads the blocks tile by tile; the batch waits for its slowest",
    "s4_continuous_batching": "a scheduler: who ends makes room at once; chunks, preemption, streaming",
    "s5_cow_sampling": "reference counts and copy-on-write: n samples of one prompt hold it once",
    "s6_prefix_caching": "chained hashes: what was computed is found again, until it is evicted",
    "s7_cpu_offload": "a second tier on the host; load or recompute, whichever is cheaper",
}


@click.command()
def stages() -> int:
    """Say which seven stages this engine grew through, and how to run them."""
    click.echo("nanovllm grew through seven stages. Each runs, and each is the one before with one idea more:\n")
    for number, (name, idea) in enumerate(STAGES.items(), start=1):
        click.echo(f"  {number}  {name.split('_', 1)[1].replace('_', ' '):<20} {idea}")
    click.echo("\nWhat this command runs is stage 7, with what a user needs beside it.\n")
    for line in how_to_run(repository()):
        click.echo(line)
    return 0


def repository() -> Path | None:
    """The folder that has the stages: where this package lies, or where the user is."""
    folders = (Path(__file__).resolve().parents[2], Path.cwd())
    return next((folder for folder in folders if (folder / "stages" / "__main__.py").is_file()), None)


def how_to_run(folder: Path | None) -> list[str]:
    if folder is None:
        return ["They are in the repository of this package, not in the package: there, python -m stages 1 runs one."]
    return [
        *([] if folder == Path.cwd() else [f"  cd {folder}"]),
        '  python -m stages 3 "Once upon a time"     run stage 3',
        "  make diff STAGE=3                         what it changes in stage 2",
        "  make exercise STAGE=3                     write it yourself",
        f"  {Path('stages') / 'README.md'}                          the path through them",
    ]
