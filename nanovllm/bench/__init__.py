"""The benchmarks of `nanovllm bench`, on a harness that stages/bench uses too.

Start with harness.py (calls that take turns), engine.py (one round of requests) and throughput.py, which uses both.
"""
