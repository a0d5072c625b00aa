"""The page that plays the pool: it is made from recorded runs of all stages, and is one file, notebooks/pool.html."""
