"""Many engines on many machines: batches on Ray Data, replicas on Ray Serve, and the choice of a replica for a request.

Start with routing.py, which doesn't need Ray. ray_data.py and ray_serve.py need the extra `ray`.
"""
