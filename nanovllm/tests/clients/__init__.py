"""Programs that use this server through other people's libraries, and the environments and servers that they need.

Each file in programs/ is what a user of one library would write. clients.toml pins the libraries, `make clients` runs
all programs, and nanovllm/docs/clients.md shows the results. Start with __main__.py.
"""
