"""Everything that measures the stages: `python -m stages.bench all` measures every figure of the course.

    harness.py     one loop that interleaves what it compares; medians, ratios and their spread
    counting.py    what can be counted: operations, allocations, the most memory held
    engines.py     the stages by name, and one engine without a model that takes any of them
    models.py      the one random model of 135M parameters, and random ones of other shapes
    workloads.py   what is asked of the engines
    timeline.py    requests that arrive while others are served, under a clock of steps or of seconds
    replay.py      requests against a pool alone, without an engine
    decode_step.py one decode step of any stage, and its attention alone
    racing.py      engines that serve the same requests, a slice of the work at a time
    results.py     results.json, and the machine in words

    scoreboard.py, decode.py, serving.py, samples.py, prefix_cache.py, offload.py   a file a table
    claims.py, locality.py   what only a clock can tell of the texts' claims
    predict/       a file a lesson
    gpu/           what a GPU shows: `make gpu`, a file a part

Arrows go one way: stages <- models <- stages.bench <- notebooks. stages.tools.prose reads results.json alone.
"""
