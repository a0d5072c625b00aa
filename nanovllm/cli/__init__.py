"""The commands: what a user types, in options of click, and core does.

commands.py        the commands as one program; each is imported when it is called
generate.py        stories, the first as it comes
batch.py           a file of requests in, results out as soon as they are there
requests_file.py   a file of requests, judged as a whole before anything is computed
results.py         what came of a request, as a line of JSON; a file that holds whole lines only
inspect_model.py   what a model needs, and what fits beside it
inspect_report.py  its numbers, and the table that shows them
flags.py           a field of a dataclass becomes an option
common.py          what both commands have: their options, and one line for a mistake
streams.py         standard input and output: closed, endless, or not in UTF-8
interrupts.py      what Ctrl-C does
"""
