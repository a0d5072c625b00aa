"""nanovllm serve: an OpenAI-compatible server in two processes, and a page that shows the engine's memory.

    client -- HTTP --> front: asyncio, JSON, chat templates, tokens -- pipe --> engine process: runs steps only

Start with run.py, then read app.py for the routes. Each endpoint has a file for its request and response bodies, such
as chat.py. generation.py takes a request through the engine. engine_process.py and engine_client.py are the two ends of
the pipe, and limits.py restricts what a client may send.
"""
