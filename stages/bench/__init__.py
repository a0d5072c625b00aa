"""All figures of the course, on the harness of nanovllm/bench: `python -m stages.bench all` measures them.

Start with scoreboard.py. Most files measure one table of results.json, and predict/ answers the lessons' questions.
Benchmarks of the package are in commands.py, and workers/ has the processes of the engines that it races. The folder
gpu/ is for `make gpu`, and texts/ has the programs of five texts. Tables and notebooks share engines.py and models.py,
racing.py (stages that serve the same tasks in turns), decode_step.py (one step of a stage), steady.py (rounds that
agree, on a quiet machine), and timeline.py and replay.py (runs without a model).
"""
