"""A chat template for models that have none, if the user says so."""

from pathlib import Path

PLAIN = """\
{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
STOP = ("\nUser:", "\nSystem:", "\nAssistant:")  # such a model would go on with both parts


def read_template(name: str | None) -> str | None:
    """Return the template in a file, or PLAIN for the word plain. Raise OSError or ValueError if it cannot be read."""
    if name is None or name == "plain":
        return name and PLAIN
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is no chat template: it is no UTF-8 text") from None
