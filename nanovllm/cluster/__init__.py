"""Many engines on many machines: batches on Ray Data, replicas on Ray Serve, and the choice of a replica.

Start at routing.py, which needs no Ray. ray_data.py and ray_serve.py import it, so they need the extra `ray`.
"""
