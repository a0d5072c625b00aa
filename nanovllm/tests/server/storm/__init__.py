"""Storms: a server under many clients, malformed requests and killed processes.

    clients.py     many streams at once, half of which hang up: the others get the same text as alone
    malformed.py   thousands of invalid requests: each gets a 4xx within a second, and no other client waits
    kills.py       kill -9 of either process and a restart, under clients that retry

    python -m nanovllm.tests.server.storm clients --clients 1000 --rounds 3
    python -m nanovllm.tests.server.storm malformed --requests 10000
    python -m nanovllm.tests.server.storm kills --kills 10
    python -m nanovllm.tests.server.storm                       all of them, like make storm

The same seed gives the same clients and requests.
"""
