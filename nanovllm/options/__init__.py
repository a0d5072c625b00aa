"""The options of an engine. Start at config.py: EngineConfig is what an engine runs with."""
