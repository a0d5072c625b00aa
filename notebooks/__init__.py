"""The notebooks, one a stage; `python -m notebooks` runs them. What they are made with is in helpers/."""
