"""Run the functions of a program whose names begin with try_: `python run.py results program.py [word]`.

It appends one line of JSON to the file `results` for each function. It runs in the environment of the program, so it
needs only the standard library.
"""

import importlib.util
import json
import sys
import traceback

results, path, word = sys.argv[1], sys.argv[2], "".join(sys.argv[3:])
sys.path.pop(0)  # this folder, whose files have the names of libraries
spec = importlib.util.spec_from_file_location("program", path)
program = sys.modules["program"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
for name in [name for name in vars(program) if name.startswith("try_") and word in name]:
    error = None
    try:
        vars(program)[name]()
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    with open(results, "a") as file:
        file.write(json.dumps({"function": name, "error": error}) + "\n")
