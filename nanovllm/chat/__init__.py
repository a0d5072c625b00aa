"""Read an assistant's output: thoughts, text and tool calls. Start with parsers_for() in formats.py.

formats.py knows how models write, forced_calls.py how a grammar makes any model call a tool, and assistant.py turns the
text of one sample, as it arrives, into the parts of a message.
"""
