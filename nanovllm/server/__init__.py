"""nanovllm serve: an OpenAI-compatible server in two processes, and a page that shows the engine's memory.

    client -- HTTP --> front: asyncio, JSON, chat templates, tokens -- pipe --> engine: a process that only steps

Start with run.py, then read app.py for the routes. Each endpoint has a file with its body and its response, such as
chat.py, and generation.py has the path between the two. engine_process.py and engine_client.py are the two ends of the
pipe, and limits.py limits what a client may do.
"""
