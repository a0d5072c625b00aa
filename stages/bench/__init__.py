"""All figures of the course, on the harness of nanovllm/bench: `python -m stages.bench all` measures them.

Start with scoreboard.py. A file is a table in results.json, predict/ answers the lessons' questions, and gpu/ is
`make gpu`. engines.py, models.py, racing.py, decode_step.py, timeline.py and replay.py serve tables and notebooks.
"""
