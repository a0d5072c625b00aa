"""The page that plays back the pool: runs of all stages are recorded and built into one file, notebooks/pool.html.

Start with build.py. record.py has the workload, moments.py the questions, animation.py the picture in README.md.
play.py puts an exercise beside its stage, and traps.py has the requests on which its mistakes show.
"""
