"""Parse an assistant's output into thoughts, text and tool calls. Start with parsers_for() in formats.py.

formats.py describes the formats in which models write, forced_calls.py builds the JSON schema that makes any model call
a tool, and assistant.py turns the text of one sample, as it arrives, into the parts of a message.
"""
