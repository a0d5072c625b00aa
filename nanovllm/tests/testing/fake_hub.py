"""A fake Hugging Face Hub on loopback: it serves one repository to huggingface_hub, and fails as the real one can."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

NAME, COMMIT, TOKEN = "someone/tiny", "c" * 40, "hf_secret"


class FakeHub(ThreadingHTTPServer):
    """A server that offers the files of `folder` as the repository NAME. Tests change its attributes as it runs."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.private = self.gated = False
        self.status: int | None = None  # for every response
        self.stalls_at: tuple[str, int] | None = None  # a file, and how many of its bytes to send
        self.goes_on = Event()
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def sent(self) -> list[str]:
        """The downloaded files, in order."""
        gets = (request for request in self.requests if request.startswith("GET") and "/resolve/" in request)
        return [request.split("/", 5)[-1] for request in gets]


class Handler(BaseHTTPRequestHandler):
    """The parts of the Hub's API and downloads that huggingface_hub uses."""

    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.server.tokens.add(self.headers.get("Authorization"))
        hub, path = self.server, self.path.split("?")[0]
        api = re.fullmatch(rf"/api/models/{NAME}(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(rf"/{NAME}/resolve/([^/]+)/(.+)", path)
        if hub.status is not None:
            self.answer(hub.status)
        elif not (api or file) or (hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            self.answer(401 if hub.private else 404, error="RepoNotFound")
        elif (file or api)[1 if file else 2] not in (None, "main", "v1", COMMIT):
            self.answer(404, error="RevisionNotFound")
        elif api and api[1] == "tree":
            self.answer_json([describe(hub.folder, file) for file in files(hub.folder)])
        elif api:
            siblings = [{"rfilename": str(file)} for file in files(hub.folder)]
            self.answer_json({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings, "tags": []})
        elif hub.gated:
            self.answer(403, error="GatedRepo")
        else:
            self.send_file(file[2])

    do_HEAD = do_GET

    def send_file(self, name: str) -> None:
        path = self.server.folder / name
        if not path.is_file():
            return self.answer(404, error="EntryNotFound")
        content = path.read_bytes()
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        total, content = len(content), content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("ETag", f'"{etag(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return None
        if self.server.stalls_at and self.server.stalls_at[0] == name:
            self.wfile.write(content[: self.server.stalls_at[1]])
            self.wfile.flush()
            self.server.goes_on.wait(60)
            self.close_connection = True
            return None
        self.wfile.write(content)
        return None

    def answer_json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode())

    def answer(self, status: int, content: bytes = b"", error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", f"{error} from the fake hub")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def describe(folder: Path, file: Path) -> dict[str, Any]:
    path = folder / file
    return {"type": "file", "path": str(file), "size": path.stat().st_size, "oid": etag(path)}


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """Run a FakeHub in a thread."""
    with FakeHub(folder) as hub:
        thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.goes_on.set()
            hub.shutdown()
            thread.join()
