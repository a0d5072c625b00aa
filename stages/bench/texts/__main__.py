"""python -m stages.bench.texts NAME ...: run programs, and print what they return as JSON."""

import json
import sys
from importlib import import_module

from stages.bench.texts import WORDS

modules = {name: import_module(f"stages.bench.texts.{name}") for name in sys.argv[1:]}
print(json.dumps({name: {key: getattr(module, key)() for key in WORDS[name]} for name, module in modules.items()}))
