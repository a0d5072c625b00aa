"""What many clients, bad clients and dying processes do to a server.

    clients.py     many streams at once, half of them hang up: the others get what they get alone, and nothing is left
    malformed.py   thousands of requests that are none: each a 4xx within a second, and nobody else waits
    kills.py       kill -9 of either process and a restart, under clients that retry

    python -m nanovllm.tests.server.storm clients --clients 1000 --rounds 3
    python -m nanovllm.tests.server.storm malformed --requests 10000
    python -m nanovllm.tests.server.storm kills --kills 10
    python -m nanovllm.tests.server.storm                       all of them, as make storm runs them

The same seed makes the same clients and the same requests.
"""
