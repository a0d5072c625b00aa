"""The options of an engine. Start with EngineConfig, in config.py."""
