# The recipe of every image of the project. EXTRAS names the extras to install: router with smg, worker, gateway, or store with cli.
# Only the worker's image has torch, with CUDA on x86-64, as PyPI has it. Packages come by the hashes of locks/ (`make lock`).
# BASE has no default: an image of Python 3.12 on Debian, by its digest: python:3.12-slim@sha256:...
ARG BASE
FROM ${BASE} AS build
ARG EXTRAS
WORKDIR /source
RUN python -m venv /opt/build && python -m venv /opt/loraplex
COPY deploy/docker/locks deploy/docker/locks
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/build/bin/pip install --require-hashes -r deploy/docker/locks/build.txt && \
    /opt/loraplex/bin/pip install --require-hashes -r "deploy/docker/locks/${EXTRAS}.txt"
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY adapter_store adapter_store
COPY clients clients
COPY loraplex loraplex
COPY router router
COPY worker worker
RUN PATH=/opt/build/bin:$PATH /opt/build/bin/pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /wheels \
    ./clients/python . && \
    /opt/loraplex/bin/pip install --no-deps --no-index /wheels/*.whl

FROM ${BASE}
ARG EXTRAS
# On CUDA Triton compiles a C module for the driver at its first launch, with gcc and the headers of the C library.
RUN [ "$EXTRAS" != worker ] || { \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
# A new volume that is mounted on the home directory gets the directory's owner.
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/loraplex loraplex
COPY --from=build /opt/loraplex /opt/loraplex
ENV PATH=/opt/loraplex/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /var/lib/loraplex
USER loraplex
# What the release passes; last, so that another commit changes no layer before.
ARG BASE
ARG VERSION=""
ARG REVISION=""
ARG CREATED=""
LABEL org.opencontainers.image.title="loraplex ${EXTRAS}" \
    org.opencontainers.image.description="One base language model, thousands of tenants' LoRA adapters, one cluster" \
    org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.created="${CREATED}"
