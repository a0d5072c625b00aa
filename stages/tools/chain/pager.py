"""A long text a page at a time, with the pager that the reader uses for git."""

import os
import shutil
import subprocess


def show_in_pager(text: str) -> bool:
    """Show `text` in the reader's pager, and wait for its end; False if there is none.

    That is what git would use: $GIT_PAGER, core.pager, $PAGER, less. A text that fits on the screen stays on it.
    """
    asked = subprocess.run(["git", "var", "GIT_PAGER"], capture_output=True, text=True)
    pager = asked.stdout.strip()
    if not pager or pager == "cat" or not shutil.which(pager.split()[0]):
        return False
    environment = {"LESS": "FRX", "LV": "-c", **os.environ}  # as git does: colours, and no pause for a short text
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, text=True, env=environment)
    try:
        process.communicate(text + "\n")
    except BrokenPipeError:  # the reader has seen enough
        process.wait()
    return True
