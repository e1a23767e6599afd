# An image that serves. For CUDA, name an index with torch for it:
#   docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.12-slim-bookworm

# The index that torch comes from: builds for CPUs unless another one is named.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0
# Which extras; `server,grammar,hf` also serves models in transformers' layers.
ARG EXTRAS=server,grammar

# g++ compiles the kernels of the CPU at their first use, and Triton's launchers on a GPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 phonograph

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# What phonograph needs besides torch follows pyproject.toml.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}" \
    && pip install --no-cache-dir ".[${EXTRAS}]"

USER 1000
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
# Loading a large model takes minutes, in which /health says 503 and `starting`.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Other containers can connect: give --api-key-file. Any Host header is taken then.
ENTRYPOINT ["phonograph", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD []
