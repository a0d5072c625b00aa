"""Requests that are not HTTP, or HTTP for paths and methods that do not exist."""

import random
import string

from ...testing.raw_http import post
from .bad_bodies import Bad

BODY = b'{"prompt": "a", "max_tokens": 1, "temperature": "x"}'  # a 400 if everything else were accepted
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")
CHUNKED = post(b"", content_length="", transfer_encoding="chunked")
SECRETS = ("/page/../../../etc/passwd", "/page/%2e%2e/%2e%2e/run.py", "/..", "/page/..%2frun.py", "/page//etc/passwd")


def head(line: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([line, *(headers or [b"host: localhost"]), b"", b""])


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=count))


def method(rng: random.Random) -> Bad:
    """Use a method that the path does not allow, or an unknown one."""
    name = rng.choice(("GET", "PUT", "PATCH", "DELETE", "HEAD", "TRACE", "OPTIONS", letters(rng, 8), "CONNECT"))
    request = head(f"{name} {rng.choice(PATHS)} HTTP/1.1".encode(), b"host: localhost", b"connection: close")
    return Bad(f"method {name if len(name) < 8 else 'unknown'}", (request,), has_text=name != "HEAD")


def target(rng: random.Random) -> Bad:
    unknown = f"/x{letters(rng, rng.choice((1, 10, 1000, 20_000)))}", f"/v1/models/{letters(rng, 9)}", "/x?a=/"
    odd = ("*", "http://other/x", "/%00", "/%ff%fe", "/%", "/v1/completions/", "/V1/completions", "/v1//completions")
    path = rng.choice((*unknown, *odd, *SECRETS))
    return Bad("target", (head(f"{rng.choice(('GET', 'POST'))} {path} HTTP/1.1".encode()),))


def first_line(rng: random.Random) -> Bad:
    lines = (
        *(b"", b"GET", b"GET /health", b"GET  /health HTTP/1.1", b"GET /health HTTP/1.1 x", b"GET\t/health\tHTTP/1.1"),
        *(b"/health GET HTTP/1.1", b"GET /health http/1.1", b"GET /health HTTP/11", b"GET /health HTTP/1"),
        *(b"GET /a b HTTP/1.1", b"G\x00T /health HTTP/1.1", b"GET /\xff HTTP/1.1", b"GET /\x7f HTTP/1.1"),
        *(b"G(T / HTTP/1.1", b"HTTP/1.1 200 OK", b"PRI * HTTP/2.0", rng.randbytes(50).replace(b"\n", b"")),
    )
    return Bad("first line", (head(rng.choice(lines)),))


def header(rng: random.Random) -> Bad:
    lines = (
        *(b"x", b": y", b"x y: z", b"x : y", b"x\x00: y", b"x: \x00", b"x: a\x01\x00b", b"\xff: y", b"x(: y"),
        *(b"x: " + b"y" * 400_000, b"y" * 400_000 + b": x", b"@" * rng.randint(1, 50)),
    )
    place = [b"host: localhost", rng.choice(lines)]
    rng.shuffle(place)
    return Bad("header", (head(b"GET /health HTTP/1.1", *place),))


def many_headers(rng: random.Random) -> Bad:
    lines = [f"{letters(rng, 6)}: {letters(rng, 6)}".encode() for _ in range(rng.choice((100, 1500, 10_000)))]
    known = [b"host: localhost", b"content-type: application/json", b"content-length: %d" % len(BODY)]
    return Bad("many headers", (head(b"POST /v1/completions HTTP/1.1", *known, *lines) + BODY,))


def host(rng: random.Random) -> Bad:
    lines = rng.choice(((b"x: y",), (b"host: a", b"host: b")))
    return Bad("host", (head(b"GET /health HTTP/1.1", *lines),))


def length(rng: random.Random) -> Bad:
    values = ("-1", "+5", "5_0", "0x5", "5, 6", "1e3", "five", "9" * 30, "5 5", "5;", "٥")
    return Bad("Content-Length", (post(BODY, content_length=rng.choice(values)),))


def wrong_length(rng: random.Random) -> Bad:
    """Declare more bytes than the client sends before it closes its side, or fewer."""
    if rng.random() < 0.5:
        return Bad("a body that ends early", (post(BODY, content_length=str(len(BODY) + rng.randint(1, 999))),), True)
    return Bad("a body that goes on", (post(BODY, content_length=str(rng.randrange(len(BODY)))),))


def both_lengths(rng: random.Random) -> Bad:
    coding = rng.choice(("chunked", "Chunked", "gzip"))
    request = post(b"", content_length=str(rng.randrange(99)), transfer_encoding=coding)
    return Bad("both lengths", (request + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),))


def coding(rng: random.Random) -> Bad:
    names = ("gzip", "identity", "gzip, chunked", "chunked, chunked", "chunked;q=1", "x", "x\r\ntransfer-encoding: x")
    return Bad("Transfer-Encoding", (post(b"", content_length="", transfer_encoding=rng.choice(names)) + b"0\r\n\r\n",))


def chunks(rng: random.Random) -> Bad:
    sizes = (b"zz", b"-1", b"0x5", b"", b" ", b"5 5", b"5\x00", b"f" * 21, b"5;" + b"x" * 40_000, b"1" * 1000)
    broken = (b"5\r\n{}\r\n\r\n", b"2\r\n{}0\r\n\r\n", b"2\r\n{}x\r\n", b"0\r\nx\r\n\r\n", b"0\r\n\x00: y\r\n\r\n")
    body = rng.choice((rng.choice(sizes) + b"\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n" + rng.choice(broken)))
    return Bad("chunk", (CHUNKED + body,), is_ended=True)


def in_pieces(rng: random.Random) -> Bad:
    """Send a bad body in pieces of random sizes."""
    sent, parts = post(BODY), []
    while sent:
        size = rng.randint(1, len(sent))
        parts.append(sent[:size])
        sent = sent[size:]
    return Bad("in pieces", tuple(parts))


def expecting(rng: random.Random) -> Bad:
    return Bad("Expect", (post(BODY, expect=rng.choice(("100-continue", "200-ok", "x"))),))


def noise(rng: random.Random) -> Bad:
    start = rng.choice((b"\x16\x03\x01\x00\xc8\x01", b"\x00", b"SSH-2.0-x\r\n", b"*1\r\n$4\r\nPING\r\n", b""))
    return Bad("noise", (start + rng.randbytes(rng.choice((10, 1000, 100_000))) + b"\r\n\r\n",), is_ended=True)


def slow(rng: random.Random) -> Bad:
    """Send a valid request that never ends."""
    good = post(b'{"prompt": "a"}', content_length="99")
    silent = (b"", b"P", CHUNKED, CHUNKED + b"9\r\n{", CHUNKED + b"f" * 15 + b"\r\n{")
    if rng.random() < 0.5:
        return Bad("slow", (rng.choice(silent),), is_slow=True)
    trickle = [each for _ in range(40) for each in (0.1, b" ")]
    return Bad("slow", (good[: rng.randint(1, len(good))], *trickle), is_slow=True)
