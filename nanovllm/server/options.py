"""ServerOptions: the server's own options. `nanovllm serve` also takes the engine's.

The page shares the server's address unless page_port is set. In that case, page_host defaults to 127.0.0.1, even if the
server accepts clients from other machines.
"""

import re
from dataclasses import dataclass, fields

from ..chat.formats import REASONING_FORMATS, TOOL_FORMATS
from ..checks import AT_LEAST_0, AT_LEAST_1, Rule, check_field, cli_option
from ..log import LEVELS

UVICORN_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
PORT_RULE: Rule = ("from 0 to 65535", lambda port: 0 <= port <= 65535)  # 0 picks a free port
RULES: dict[str, Rule] = {
    **dict.fromkeys(("port", "page_port"), PORT_RULE),
    **dict.fromkeys(("shutdown_timeout", "watchdog_timeout", "header_timeout", "body_timeout"), AT_LEAST_0),
    **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), AT_LEAST_0),
    **dict.fromkeys(("max_request_tokens", "max_body_bytes"), AT_LEAST_1),
    "max_logprobs": ("at least -1", lambda count: count >= -1),
    "root_path": ("a path such as /models", lambda path: re.fullmatch(r"(/[\w.~-]+)*/?", path) is not None),
}


@dataclass(frozen=True)
class ServerOptions:
    """The options of `nanovllm serve`."""

    host: str = cli_option("127.0.0.1", "address to listen on; 0.0.0.0 means all addresses of this machine")
    port: int = cli_option(8000, "port; 0 picks a free one, shown once the server is ready")
    page_port: int | None = cli_option(None, "separate port for the page and /metrics; default: the same port")
    page_host: str | None = cli_option(None, "address for --page-port; default: 127.0.0.1")
    root_path: str = cli_option("", "path at which a proxy serves this server, such as /models")
    chat_template: str | None = cli_option(None, "file with a chat template, or `plain`; default: the model's own")
    tool_call_parser: str = cli_option(
        "auto", "format of tool calls; auto takes it from the chat template", ("auto", "none", *TOOL_FORMATS)
    )
    reasoning_parser: str = cli_option(
        "auto", "format of reasoning; auto takes it from the chat template", ("auto", "none", *REASONING_FORMATS)
    )
    show_text: bool = cli_option(False, "show prompts and outputs, not only blocks, to everyone who opens the page")
    shutdown_timeout: float = cli_option(30.0, "seconds for running requests to finish after SIGTERM")
    watchdog_timeout: float = cli_option(
        300.0, "seconds without progress after which /health returns 503 if there is work, and SIGTERM ends the engine"
    )
    allowed_origins: str | None = cli_option(
        None, "sites whose pages may send requests, separated by commas or as a JSON list; * allows all"
    )
    allowed_hosts: str | None = cli_option(
        None,
        "host names that clients may use for this server, separated by commas; * allows all; "
        "IP addresses, localhost and --host always work",
    )
    max_num_queued_reqs: int | None = cli_option(
        None, "maximum number of samples running or waiting; requests beyond it get status 429"
    )
    max_num_queued_tokens: int | None = cli_option(
        None, "maximum number of tokens in prompts without output; once it is reached, requests get status 429"
    )
    max_logprobs: int = cli_option(20, "most log-probabilities per token that a request may ask for; -1 for no limit")
    max_request_tokens: int | None = cli_option(1 << 20, "most tokens of one request, counting all prompts and samples")
    max_body_bytes: int = cli_option(1 << 22, "most bytes of a request's body")
    header_timeout: float = cli_option(10.0, "seconds in which a request's headers must arrive")
    body_timeout: float = cli_option(
        60.0, "seconds in which a request's body must arrive, and for which a client may stop reading a response"
    )
    log_level: str = cli_option("info", "lowest level of log lines to print on standard error", LEVELS)
    uvicorn_log_level: str = cli_option("error", "lowest level of lines from uvicorn, the HTTP server", UVICORN_LEVELS)
    disable_uvicorn_access_log: bool = cli_option(False, "don't log each request")
    disable_access_log_for_endpoints: str | None = cli_option(
        None, "paths whose requests are not logged, separated by commas, such as /health,/metrics"
    )
    api_keys: tuple[str, ...] = ()  # from --api-key, which may be repeated, or its environment variable

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid option, with its name and value."""
        for option in fields(self):
            if option.name in RULES:
                check_field(option, getattr(self, option.name), RULES)
        if self.page_host is not None and self.page_port is None:
            raise ValueError(f"page_host is {self.page_host}, but page_port is missing: set both")
        for host in read_list(self.allowed_hosts):
            if "/" in host or ("*" in host and host != "*"):
                raise ValueError(f"allowed_hosts must be names such as gpu-box, or * for all, got {host!r}")
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys must not contain an empty key")

    @property
    def page_address(self) -> tuple[str, int] | None:
        """The page's own host and port, or None if the page shares the server's."""
        return None if self.page_port is None else (self.page_host or "127.0.0.1", self.page_port)


def read_list(option: str | None) -> list[str]:
    """Return the items of a JSON list, as in vLLM, or of a comma-separated list.

    >>> read_list("http://a, http://b"), read_list('["*"]'), read_list(None)
    (['http://a', 'http://b'], ['*'], [])
    """
    items = (option or "").removeprefix("[").removesuffix("]").split(",")
    return [item for each in items if (item := each.strip(' "'))]
