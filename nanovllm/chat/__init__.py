"""Parse an assistant's output into thoughts, text and tool calls. Start with formats_for() in formats.py.

formats.py describes how models write thoughts and tool calls, forced_calls.py builds the JSON schema that makes any
model call a tool, and assistant.py turns the text of one output, as it arrives, into the parts of a message.
"""
