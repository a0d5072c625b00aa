"""What stages/chain.py is made of: one idea a file, the standard library and git only; checking.py runs pytest.

model.py        stages, changes, steps
load.py         chain.toml, read into them
lines.py        lines of code, and how many of them a stage adds
functions.py    a function's place in a source file, and its body swapped for another
fits.py         does the body of the stage before still fit?
git.py          git, run and checked
copy.py         the last stage's code again, in the finished package
diffs.py        a link to read: coloured in a terminal, or as DIFF.md
pager.py        a long text a page at a time
check.py        every way in which the stages can differ from what chain.toml says
exercise.py     a copy of a stage with the functions of its exercise opened
checking.py     a learner's work: the tests of the step that it is at, and at the end the gain
told.py         a plugin of pytest, for it: how each test ended
red.py          a red test, in words
gain.py         the gain of a stage, counted
proof.py        the proof that an exercise is red before each step and green after it
propagate.py    an edit of an early stage, merged forward link by link
progress.py     how far a propagate has come, while it is unfinished
"""

from .lines import added_lines
from .load import load
from .model import Chain, ChainError, Change, FunctionName, Stage, Step

__all__ = ["Chain", "ChainError", "Change", "FunctionName", "Stage", "Step", "added_lines", "load"]
