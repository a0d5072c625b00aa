"""The notebooks: one per stage, one for the package, and one for claims. `python -m notebooks` runs them."""
