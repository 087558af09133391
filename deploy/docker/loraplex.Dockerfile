# The recipe of every image of the project. EXTRAS names the extras to install: router, worker, gateway, or store,cli. Only
# the worker's image has torch.
FROM python:3.12-slim AS build
ARG EXTRAS
WORKDIR /source
RUN python -m venv /opt/loraplex
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY adapter_store adapter_store
COPY artifacts artifacts
COPY broker broker
COPY clients clients
COPY deploy deploy
COPY router router
COPY rpc rpc
COPY telemetry telemetry
COPY worker worker
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/loraplex/bin/pip install -c constraints.txt ./clients/python ".[${EXTRAS}]"

FROM python:3.12-slim
# A new volume that is mounted on the home directory gets the directory's owner.
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/loraplex loraplex
COPY --from=build /opt/loraplex /opt/loraplex
ENV PATH=/opt/loraplex/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /var/lib/loraplex
USER loraplex
