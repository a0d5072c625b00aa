# nanovllm serve, with the shipped checkpoint:
#
#   docker build -t nanovllm .
#   docker run --rm -p 127.0.0.1:8000:8000 nanovllm
#
# Another model: docker run ... -v path/to/model:/model:ro nanovllm /model --host 0.0.0.0
FROM python:3.12-slim

# The CPU build of torch; for a GPU name another index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /app
COPY constraints.txt ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY nanovllm ./nanovllm
RUN pip install --no-cache-dir ".[serve,structured,kernels]"
COPY models/storyteller ./models/storyteller

# Numba keeps what it has compiled in the user's home.
RUN useradd --create-home --uid 10001 nanovllm
USER nanovllm

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["nanovllm", "serve"]
CMD ["models/storyteller", "--host", "0.0.0.0"]
