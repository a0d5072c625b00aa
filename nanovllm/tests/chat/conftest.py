"""The chat templates of real models belong to the repository: without it, these tests are left out."""

from pathlib import Path

TEMPLATES = Path(__file__).parents[3] / "tests" / "chat_templates"
collect_ignore_glob = [] if TEMPLATES.is_dir() else ["test_*.py"]
