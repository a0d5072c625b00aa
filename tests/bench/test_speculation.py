"""python -m stages.bench speculation: edits that are forced, and stories."""

import json

from nanovllm.tests.testing.checkpoints import write_checkpoint


def test_speculation_forces_edits_and_writes_stories(run, tmp_path):
    checkpoint, file = write_checkpoint(tmp_path, max_position_embeddings=256), tmp_path / "report.json"
    flags = ("--output-len", "24", "--edit-every", "8", "--batch-sizes", "2", "--rounds", "1", "--json", str(file))
    status, table, err = run("speculation", *flags, "--model", str(checkpoint))
    assert (status, err) == (0, "") and "2 stories again" in table
    measured = json.loads(file.read_text())["measured"]
    assert all(numbers["same_outputs"] == 2 for numbers in measured.values())
    edits = measured["2 edits"]
    assert edits["drafted"] > edits["accepted"] > 24 and edits["tokens_per_step"] > 1.5
