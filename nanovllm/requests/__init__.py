"""What goes in and out of an engine: prompts, parameters, outputs. Start at sampling_params.py and outputs.py."""
