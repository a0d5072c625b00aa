"""All figures of the course, on the harness of nanovllm/bench: `python -m stages.bench all` measures them.

Start with scoreboard.py. Most files measure one table of results.json, and predict/ answers the lessons' questions.
The folder gpu/ is for `make gpu`. Tables and notebooks share engines.py, models.py, racing.py, decode_step.py,
timeline.py and replay.py.
"""
