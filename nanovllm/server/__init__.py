"""nanovllm serve: an OpenAI-compatible server in two processes, and a page that shows the engine's memory.

    client -- HTTP --> front: asyncio, JSON, chat templates, tokens -- pipe --> engine: a process that only steps

Start with run.py, then read app.py for the routes and openai.py for the path of a request. protocol.py has the bodies,
engine_process.py and engine_client.py are the two ends of the pipe, and limits.py limits what a client may do.
"""
