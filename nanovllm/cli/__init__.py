"""The commands: what a user types, in options of click, and the engine does.

commands.py        the commands as one program; each is imported when it is called
generate.py        stories, the first as it comes; stories.py shows them, and what they took of the pool
chat.py            a conversation in the terminal
batch.py           a file of requests in, results out as soon as they are there
serve.py           an OpenAI server; server/ is what serves
inspect_model.py   what a model needs, and what fits beside it; inspect_report.py has the numbers and the table
bench.py           how fast the engine is here; benchmarks/ measures
trace.py           what a trace holds, or the same for a viewer; tracing.py writes one
stages.py          which stages there are, and how to run them

A command's file has its options, and imports the engine, and torch with it, when the command runs.

flags.py           a knob becomes an option
common.py          one line for a mistake, and where the checkpoint lies
streams.py         standard input and output: closed, endless, or not in UTF-8
interrupts.py      what Ctrl-C does
compiling.py       kernels that are being compiled when a command ends, or must be before it begins
ticker.py          the engine's state on standard error while it works

batch:
batch_run.py       a run: what can be wrong is told first
requests_file.py   a file of requests, judged as a whole, and read again while it is served
request_lines.py   what it holds, a value at a time: JSON lines, or one document
request.py         a request in this engine's form
openai_lines.py    a line of OpenAI's batches
ids.py             which ids there are, in eight bytes each
resume.py          what a file of results holds already
serving.py         requests through the engine, results out
results.py         what came of a request, as a line of JSON
openai_results.py  the same in the form of OpenAI's batches; server/openai/ has its bodies
results_file.py    a file that holds whole lines only
chats.py           conversations as prompts

chat:
talk.py            the conversation itself
conversation.py    what was said, and as much of it as fits the model
messages.py        what the user says
"""
