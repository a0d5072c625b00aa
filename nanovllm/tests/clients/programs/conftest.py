"""Programs for other environments than pytest's: `make clients` runs them, and pytest skips them."""

collect_ignore_glob = ["*.py"]
