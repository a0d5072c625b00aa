"""The notebooks, one a stage, and what they share: pictures, traffic, timings. `python -m notebooks` runs them."""
