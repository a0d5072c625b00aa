"""The command line: click parses the arguments, and the engine does the work.

Start at commands.py, which lists the commands. Each command has its own file. click_options.py makes options from
dataclasses, terminal.py handles standard streams and Ctrl-C, and batch_files.py reads and writes the files of
`nanovllm batch`. A command imports the engine, and torch with it, only when it runs.
"""
