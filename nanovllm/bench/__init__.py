"""One harness for everything that is measured: the commands of `nanovllm bench`, and the course's figures.

Start with harness.py (calls that take turns), engine.py (one round of requests) and throughput.py, which uses both.
"""
