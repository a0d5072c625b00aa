"""What the hub, or the way to it, raises: a ValueError of one line that says what to do."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .repository import Repository


@contextmanager
def one_line(found: Repository) -> Iterator[None]:
    """Whatever the hub or the way to it raises becomes a ValueError of one line; its warnings are not shown."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise ValueError(what_to_do(error, found)) from None
    finally:
        logger.setLevel(level)


def what_to_do(error: Exception, found: Repository) -> str:
    from huggingface_hub import constants, errors

    name, missing, cause = found.name, f"there is no folder {Path(found.name).absolute()}", error.__cause__ or error
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on {constants.ENDPOINT}/{name}, and set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} on the hub has no revision {found.revision!r}: name a branch, a tag or a whole commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{missing}, and the hub has no model {name}, or it is private: then set HF_TOKEN to your token"
    if isinstance(error, errors.HFValidationError):
        return f"{missing}, and {name!r} is no name of the hub: {first_line(error)}"
    if status_of(cause) in (401, 403):
        return f"the hub refuses {name} (status {status_of(cause)}): set HF_TOKEN to a token that may read it"
    no_copy = f"{missing}, and {found.cache} has no whole copy of the hub's {name}"
    if constants.HF_HUB_OFFLINE:
        return f"{no_copy}: unset HF_HUB_OFFLINE to fetch it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{no_copy}, and {constants.ENDPOINT} cannot be reached ({first_line(cause)}): try again"
    return f"{name} could not be fetched from {constants.ENDPOINT} ({first_line(error)}): try again"


def status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def first_line(error: BaseException) -> str:
    """
    >>> first_line(ConnectionError("refused\\nfor the third time"))
    'ConnectionError: refused'
    """
    status = status_of(error)
    return f"status {status}" if status else f"{type(error).__name__}: {error}".splitlines()[0][:200]
