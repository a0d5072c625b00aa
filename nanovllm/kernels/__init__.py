"""The fast paths on a CPU: kernels in Python, which Numba compiles. The engine runs without any of them.

options.py     attention_backend and enforce_eager
choice.py      what an engine computes with, and why
compiler.py    a spawned process that compiles while the engine serves
compiling.py   what it runs; and the same in this process
cache.py       where compiled kernels are kept
threads.py     Numba's threads, the same as torch's
entries.py     what is compiled
runner.py      steps of the engine on kernels

The others are the kernels themselves, one file each.
"""
