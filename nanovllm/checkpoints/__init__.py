"""What a checkpoint is on its way to the engine: where it lies, in what form, and what it says of itself.

hub.py                 a folder, or a name of the hub, whose files are fetched
hub_errors.py          what may go wrong on the way, in one line
forms.py               files that are no safetensors checkpoint are told by name, with what to do
generation_config.py   sampling parameters that a checkpoint recommends
sizes.py               parameters, bytes of weights, and what of a memory is left for keys and values
shapes.py              published models of 0.5 to 405 billion parameters, in numbers
"""
