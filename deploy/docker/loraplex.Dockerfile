# The recipe of every image of the project. EXTRAS names the extras to install: router with smg, worker, gateway, or store with cli.
# Only the worker's image has torch, with CUDA on x86-64, as PyPI has it. Packages come by the hashes of locks/ (`make lock`).
FROM python:3.12-slim AS build
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

FROM python:3.12-slim
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
