"""nanovllm serve: an OpenAI server in two processes, and the page that shows an engine's memory.

    client -- HTTP --> front: asyncio, JSON, chat templates, tokens -- a pipe --> engine: a process that only steps

run.py             the front from the first moment to the exit status; addresses.py has its sockets
options.py         what the command line says of the server
messages.py        what goes through the pipe
engine_process.py  the engine's side of it
engine_client.py   the front's side of it
request_stream.py  what the engine has said of one request, and nobody has read yet
app.py             State, the routes, the application
requests.py        a request's body as JSON, and the client that hangs up
events.py          the feed of the page: what the engine tells of its memory, while somebody looks
event_stream.py    /events, to one viewer
page_routes.py     / and the files of the page
errors.py          what is told to a client in place of an answer
http_protocol.py   HTTP for clients that are slow, or speak something else; checked_connection.py has its limits
system.py          what the front asks of the operating system, to serve many at a time
auth.py origins.py request_ids.py    what every request goes through; small_answers.py is theirs
limits.py          how much may be asked for, and may wait
metrics.py         /metrics; step_times.py is an observer that counts for it in each step
openai/            the bodies of OpenAI's interface; nanovllm batch reads and writes them, too
page/              plays an engine's memory, recorded or live
"""
