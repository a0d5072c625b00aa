"""nanovllm serve: an OpenAI-compatible server in two processes, and a page that shows the engine's memory.

    client -- HTTP --> API server: asyncio, JSON, chat templates, tokens -- pipe --> engine process: steps only

Start with run.py, then read app.py for the routes. Each endpoint has a file for its request and response bodies, such
as chat.py. generation.py takes a request through the engine. engine_client.py and engine_process.py are the two ends of
the pipe, and limits.py restricts what a client may send.
"""
