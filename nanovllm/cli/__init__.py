"""The commands: click reads what a user types, and the engine does the work.

Start at commands.py, the program with the list of commands; each command is a file. click_options.py reads the options
from dataclasses, terminal.py has standard streams and Ctrl-C, batch_files.py the formats of `nanovllm batch`. A command
imports the engine, and torch with it, when it runs.
"""
