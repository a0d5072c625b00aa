"""The inputs and outputs of an engine: prompts, parameters and results. Start at sampling_params.py and outputs.py."""
