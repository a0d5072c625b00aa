"""python -m notebooks.helpers.claims.programs NAME ...: run programs, and print their cases as JSON."""

import json
import sys
from importlib import import_module

modules = {name: import_module(f"notebooks.helpers.claims.programs.{name}") for name in sys.argv[1:]}
print(json.dumps({name: module.cases() for name, module in modules.items()}))
