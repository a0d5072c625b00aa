# nanovllm serve, with the shipped checkpoint:
#
#   docker build -t nanovllm .
#   docker run --rm -p 127.0.0.1:8000:8000 nanovllm
#
# Another model: docker run ... -v /path/to/model:/model:ro nanovllm /model
# Compiled kernels outlast the container with -v nanovllm-cache:/home/nanovllm/.cache
FROM python:3.12-slim

# The CPU build of torch and what torch needs come from here; for a GPU name another index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY nanovllm ./nanovllm
RUN pip install --no-cache-dir -c constraints.txt ".[serve,kernels]"

WORKDIR /app
COPY models/storyteller ./models/storyteller

# By number: an orchestrator that refuses root reads no names. Numba keeps what it has compiled in the home.
RUN useradd --create-home --uid 10001 nanovllm
USER 10001

# No proxy of the environment stands between the server and the question for its health.
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection as H; c = H('127.0.0.1', 8000, timeout=2); \
c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]

# A list, and no shell: SIGTERM reaches the server. `docker stop` kills after 10 seconds: before that it has ended.
STOPSIGNAL SIGTERM
ENTRYPOINT ["nanovllm", "serve", "--host", "0.0.0.0", "--shutdown-timeout", "6"]
CMD ["models/storyteller", "--chat-template", "plain"]
