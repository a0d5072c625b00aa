"""nanovllm serve: an OpenAI-compatible server in two processes, and a page that shows the engine's memory.

    client -- HTTP --> front: asyncio, JSON, chat templates, tokens -- pipe --> engine: a process that only steps

Start with run.py, then app.py for the routes, and openai.py for the way of a request. protocol.py has the bodies,
engine_process.py and engine_client.py the two ends of the pipe, limits.py all limits of what a client may do.
"""
