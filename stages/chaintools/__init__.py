"""What stages/chain.py is made of: one idea a file, the standard library and git only.

model.py        stages, changes, steps
load.py         chain.toml, read into them
lines.py        lines of code, and how many of them a stage adds
functions.py    a function's place in a source file, and its body swapped for another
git.py          git, run and checked
copy.py         the last stage's code again, in the finished package
diffs.py        a link to read: coloured in a terminal, or as DIFF.md
check.py        every way in which the stages can differ from what chain.toml says
exercise.py     a copy of a stage with the functions of its exercise opened
proof.py        the proof that an exercise is red before each step and green after it
propagate.py    an edit of an early stage, merged forward link by link
progress.py     how far a propagate has come, while it is unfinished
"""

from .lines import added_lines
from .load import load
from .model import Chain, ChainError, Change, FunctionName, Stage, Step

__all__ = ["Chain", "ChainError", "Change", "FunctionName", "Stage", "Step", "added_lines", "load"]
