"""The check of compose.yaml and its Dockerfiles: the shipped ones pass, each kind of mistake is named."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.compose_check import check, lock_problems, read_instructions
from tests.deploy.mistakes import expect_problem

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = "compose.yaml"
DOCKERFILE = "deploy/docker/loraplex.Dockerfile"
REGISTER = "deploy/docker/register.sh"
LOCK = "deploy/docker/locks/gateway.txt"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The project's tree, of links, with copies of the files that a test changes."""
    for entry in ROOT.iterdir():
        if entry.name not in (COMPOSE, "deploy"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "deploy" / "docker").mkdir(parents=True)
    for name in ("edge", "monitoring"):
        (tmp_path / "deploy" / name).symlink_to(ROOT / "deploy" / name)
    shutil.copytree(ROOT / "deploy" / "docker" / "locks", tmp_path / "deploy" / "docker" / "locks")
    for name in (COMPOSE, DOCKERFILE, REGISTER):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_the_shipped_files_name_nothing_that_does_not_exist(tree: Path) -> None:
    assert check(tree) == []


def test_the_lock_of_the_operator_s_image_which_compose_does_not_start_is_complete() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert list(lock_problems("deploy/docker/locks/operator.txt", ROOT, project)) == []


def test_a_drained_worker_stays_down_and_each_gets_a_gpu_where_asked() -> None:
    services = yaml.safe_load((ROOT / COMPOSE).read_text())["services"]
    assert services["worker"]["restart"] == "on-failure"
    assert {name for name, body in services.items() if "healthcheck" in body} >= {
        "store",
        "router",
        "gateway",
        "worker",
    }
    override = yaml.safe_load((ROOT / "deploy/docker/cuda.yaml").read_text())["services"]
    assert set(override) == {"worker"}
    (device,) = override["worker"]["deploy"]["resources"]["reservations"]["devices"]
    # Give each rank a GPU, and the ranks the shared memory in which they meet.
    assert device == {"driver": "nvidia", "count": "${TENSOR_PARALLEL:-1}", "capabilities": ["gpu"]}
    assert "--tensor-parallel=${TENSOR_PARALLEL:-1}" in services["worker"]["command"]
    assert override["worker"]["shm_size"] == "1gb"


def test_a_build_gets_what_the_dockerfile_copies_and_nothing_else() -> None:
    copies = [at for at in read_instructions((ROOT / DOCKERFILE).read_text()) if at.name == "COPY"]
    copied = {source for at in copies if "from" not in at.flags for source in at.arguments[:-1]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def test_only_the_proxy_is_reached_by_clients() -> None:
    services = yaml.safe_load((ROOT / COMPOSE).read_text())["services"]
    published = {name for name, body in services.items() if "ports" in body and "profiles" not in body}
    assert published == {"edge"}


def test_the_worker_s_image_has_the_compiler_that_triton_starts_at_its_first_launch() -> None:
    """Triton compiles a C module for the driver: it needs gcc and the headers of the C library in the last stage."""
    last_stage = (ROOT / DOCKERFILE).read_text().rpartition("\nFROM ")[2]
    (install,) = [at for at in read_instructions(last_stage) if at.name == "RUN" and "apt-get" in at.text]
    assert {"gcc", "libc6-dev"} <= set(install.arguments)
    assert '[ "$EXTRAS" != worker ] ||' in install.text, "the other images need no compiler"


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        (COMPOSE, "- worker\n", "- wroker\n", "service worker: loraplex wroker: no such command"),
        (COMPOSE, "--relay-port=", "--relay-prot=", "service router: loraplex router: unknown flag --relay-prot"),
        (COMPOSE, "loraplex, probe", "loraplex, prober", "loraplex prober: no such command"),
        (COMPOSE, "{LORAPLEX_REDIS_URL:", "{LORAPLEX_REDIS:", "variable LORAPLEX_REDIS is known to no command of it"),
        (COMPOSE, "LORAPLEX_STORE_ADDRESS", "LORAPLEX_STORE_ADRESS", "variable LORAPLEX_STORE_ADRESS is known to no"),
        (COMPOSE, "loraplex.Dockerfile", "loraplex.dockerfile", "no Dockerfile deploy/docker/loraplex.dockerfile"),
        (COMPOSE, "EXTRAS: gateway", "EXTRAS: gateways", "no lock deploy/docker/locks/gateways.txt: run `make lock`"),
        (COMPOSE, "EXTRAS: gateway", "EXTRA: gateway", "build argument EXTRA is not an ARG of it"),
        (COMPOSE, "redis://valkey:6379", "redis://redis:6379", "redis:6379: no service redis"),
        (COMPOSE, "--store=store:50052", "--store=store:50051", "store:50051: store does not listen on 50051"),
        (
            COMPOSE,
            "127.0.0.1:50051:50051",
            "127.0.0.1:50051:50050",
            "publishes port 50050, which it does not listen on",
        ),
        (COMPOSE, "./examples/model}", "./examples/modle}", "mounts ./examples/modle, which does not exist"),
        (COMPOSE, "--model=/models/base", "--model=/model/base", "path /model/base is neither mounted nor the image's"),
        (COMPOSE, "${MODEL:-./examples/model}", "${MODEL}", "variable MODEL has no default"),
        (COMPOSE, "valkey:9.1", "valkey", "service valkey: image valkey/valkey has no version"),
        (COMPOSE, "    user: valkey\n", "", "service valkey: runs as root"),
        (COMPOSE, "  store: {condition", "  shop: {condition", "depends on shop, which is no service"),
        (COMPOSE, "\n  valkey:\n  store:\n", "\n  store:\n", "volume valkey is not declared"),
        (COMPOSE, "stop_grace_period", "stop_grace_time", "unknown key stop_grace_time"),
        (COMPOSE, "  read_only: true\n", "", "service valkey: read_only is not True"),
        (
            COMPOSE,
            "    tmpfs: [/tmp, /var",
            "    cap_drop: []\n    tmpfs: [/tmp, /var",
            "router: cap_drop is not ['ALL']",
        ),
        (COMPOSE, "no-new-privileges:true", "seccomp:unconfined", "worker: security_opt is not ['no-new-privileges"),
        (COMPOSE, "max-file: ", "files: ", "worker: logging is not {'driver': 'local'"),
        (COMPOSE, "services:", "services: [", "can't be read as services"),
        (COMPOSE, "services:", "service:", "can't be read as services"),
        (REGISTER, "loraplex models push", "loraplex models psh", "loraplex models psh: no such command"),
        (REGISTER, "--quantize", "--quantise", "loraplex models push: unknown flag --quantise"),
        (REGISTER, "loraplex models", "lora models", "lora: not a command of this project"),
        (DOCKERFILE, "COPY router router\n", "", "builds without a copy of router"),
        (DOCKERFILE, "COPY router router", "COPY routers routers", "no file or directory routers"),
        (
            DOCKERFILE,
            "COPY deploy/docker/locks deploy/docker/locks\n",
            "",
            "installs without a copy of deploy/docker/locks",
        ),
        (DOCKERFILE, "--require-hashes -r deploy", "-r deploy", "installs without --require-hashes"),
        (LOCK, "starlette==", "starlet==", "gateway.txt: starlette of pyproject.toml is missing: run `make lock`"),
        (LOCK, "starlette==1", "starlette==0", "in constraints.txt starlette is 1"),
        (DOCKERFILE, "--from=build", "--from=builder", "no stage builder"),
        (DOCKERFILE, "USER loraplex\n", "", "the last stage runs as root"),
        (DOCKERFILE, "WORKDIR /source", "WORKDR /source", "unknown instruction WORKDR"),
        (COMPOSE, "BASE:-python:3.12-slim", "BASE:-python", "image python has no version"),
    ],
)
def test_names_the_mistake(tree: Path, name: str, old: str, new: str, problem: str) -> None:
    expect_problem(check, tree, name, old, new, problem)
