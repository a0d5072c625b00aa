"""python -m stages.bench.texts NAME ...: run programs, and print their cases as JSON."""

import json
import sys
from importlib import import_module

modules = {name: import_module(f"stages.bench.texts.{name}") for name in sys.argv[1:]}
print(json.dumps({name: module.cases() for name, module in modules.items()}))
