"""The files in deploy/ for containers and Kubernetes: their flags are known, their parts fit, their scripts run."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flintmq import __version__
from flintmq.options import NsqadminOptions, NsqdOptions, NsqlookupdOptions, read_flags
from support.nsq_client import BlockingNsqClient
from test_service import Process

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text())
OPTIONS = {"nsqd": NsqdOptions, "nsqlookupd": NsqlookupdOptions, "nsqadmin": NsqadminOptions}


def flags_of(words: list[str]) -> dict[str, Any]:
    """Return the flags of a daemon's command line; an unknown one is an error."""
    program, *argv = words
    return read_flags(OPTIONS[program], argv)


def manifests() -> list[dict[str, Any]]:
    found = [document for path in KUBERNETES.rglob("*.yaml") for document in yaml.safe_load_all(path.read_text())]
    return [document for document in found if document["kind"] != "Kustomization"]


def manifest(kind: str, name: str) -> dict[str, Any]:
    [found] = [each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def container(kind: str, name: str) -> dict[str, Any]:
    [only] = manifest(kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(only)


# --- The image --------------------------------------------------------------------------------------------------------


def test_the_final_stage_has_no_compiler_and_no_root() -> None:
    build, final = re.split(r"(?m)^FROM ", DOCKERFILE)[1:]
    assert "gcc" in build and "--require-hashes" in build
    assert not re.search(r"gcc|apt-get|pip install", final)
    assert re.search(r"(?m)^USER [1-9]\d*:", final) and re.search(r"(?m)^VOLUME /data$", final)
    assert "HEALTHCHECK" in final


def test_what_the_image_copies_is_there_and_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", DOCKERFILE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source


def test_the_command_of_the_image_has_known_flags() -> None:
    [command] = re.findall(r"(?m)^CMD (\[\"nsqd\".*\])$", DOCKERFILE)
    assert flags_of(json.loads(command))["data-path"] == "/data"


def test_the_health_check_tells_a_broker_that_lives(tmp_path: Path) -> None:
    [command] = re.findall(r"(?m)^    CMD (\[.*\])$", DOCKERFILE)
    running = Process(tmp_path, "--http-address=127.0.0.1:0")
    try:
        port = running.wait_for(r"HTTP: listening on 127\.0\.0\.1:(\d+)")[1]
        words = [word.replace("4151", port) for word in json.loads(command)]
        assert subprocess.run([sys.executable, *words[1:]], check=False, capture_output=True).returncode == 0
    finally:
        running.process.kill()
        running.process.communicate()
    assert subprocess.run([sys.executable, *words[1:]], check=False, capture_output=True).returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    os.environ.get("FLINTMQ_EXHAUSTIVE") != "1", reason="FLINTMQ_EXHAUSTIVE=1 builds the image, which takes minutes"
)
@pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in ("debootstrap", "buildah")),
    reason="needs root, debootstrap and buildah",
)
def test_the_image_is_built_and_its_daemons_run_as_compose_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "try-image"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("try-image: passed\n")


# --- Compose ----------------------------------------------------------------------------------------------------------


def test_the_daemons_of_compose_have_known_flags_and_find_each_other() -> None:
    services = COMPOSE["services"]
    flags = {name: flags_of(service["command"]) for name, service in services.items() if service["image"] == "flintmq"}
    brokers = [name for name in flags if name.startswith("nsqd")]
    assert len(brokers) == 2 and len(flags) == 4
    assert len({str(flags[name]["node-id"]) for name in brokers}) == 2
    for name in brokers:
        assert flags[name]["broadcast-address"] == name
        assert "nsqlookupd:4160" in str(flags[name]["lookupd-tcp-address"])


def test_compose_publishes_on_loopback_only_and_mounts_files_that_exist() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]


def test_compose_matches_the_schema_of_its_specification() -> None:
    check_jsonschema = pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema")
    import jsonschema

    schemas = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor"
    jsonschema.validate(COMPOSE, json.loads((schemas / "compose-spec.json").read_text()))


def test_prometheus_of_compose_scrapes_both_brokers() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus-compose.yml").read_text())["scrape_configs"]
    hosts = {target.split(":")[0] for target in job["static_configs"][0]["targets"]}
    assert hosts == {name for name in COMPOSE["services"] if name.startswith("nsqd")}
    assert job["job_name"] == "nsqd"  # the alerts and the dashboard ask for it


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def test_every_manifest_is_part_of_a_kustomization() -> None:
    for folder in (KUBERNETES, KUBERNETES / "monitoring"):
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        assert set(listed) == {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}


def test_the_manifests_name_the_image_of_this_version() -> None:
    [image] = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["images"]
    assert image["newTag"] == __version__


def test_manifests_match_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate: 100 MB of schemas")
    # Of operators there are no schemas there.
    own = [each for each in manifests() if re.fullmatch(r"[^.]+|(?!sparkoperator).*k8s\.io.*", each["apiVersion"])]
    assert len(own) > 8
    for each in own:
        validate.validate(each, validate.latest_version(), strict=True)


def test_the_spark_application_runs_the_example_that_the_docs_show() -> None:
    [application] = yaml.safe_load_all((KUBERNETES / "spark" / "archive.yaml").read_text())
    spec = application["spec"]
    page = (DEPLOY.parent / "docs" / "spark-clusters.md").read_text()
    program = DEPLOY.parent / "examples" / "spark_archive.py"
    assert f'```python title="examples/{program.name}"\n{program.read_text()}```' in page
    assert spec["mainApplicationFile"] == "local:///opt/archive.py"
    assert f"COPY examples/{program.name} /opt/archive.py\n" in page
    # A checkpoint that is lost with its pod would end the query.
    assert spec["arguments"][2].startswith(spec["driver"]["volumeMounts"][0]["mountPath"])
    assert spec["restartPolicy"]["type"] == "Always"


def expanded(text: str) -> str:
    """Fill in what Kubernetes and the shell would, for the first pod."""
    text = text.replace("${POD_NAME##*-}", "0").replace("$POD_NAME.", "nsqd-0.").replace("$(POD_NAME)", "nsqlookupd-0")
    return text.replace("$POD_NAMESPACE", "flintmq").replace("$(POD_NAMESPACE)", "flintmq")


def test_the_pods_have_known_flags_and_stable_addresses() -> None:
    script = container("StatefulSet", "nsqd")["command"][2]
    flags = flags_of(shlex.split(expanded(script).replace("\\\n", " "))[1:])
    assert flags["broadcast-address"] == "nsqd-0.nsqd.flintmq.svc"
    assert manifest("StatefulSet", "nsqd")["spec"]["serviceName"] == "nsqd"
    assert manifest("Service", "nsqd")["spec"]["clusterIP"] == "None"
    grace = manifest("StatefulSet", "nsqd")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace * 10**9 > flags["drain-timeout"]
    for kind, name in (("StatefulSet", "nsqlookupd"), ("Deployment", "nsqadmin")):
        flags_of([expanded(word) for word in container(kind, name)["command"]])
    replicas = manifest("StatefulSet", "nsqlookupd")["spec"]["replicas"]
    named = set(re.findall(r"nsqlookupd-(\d)\.", script))
    assert named == {str(number) for number in range(replicas)}


def test_no_pod_runs_as_root_or_writes_beside_its_volume() -> None:
    for kind, name in (("StatefulSet", "nsqd"), ("StatefulSet", "nsqlookupd"), ("Deployment", "nsqadmin")):
        assert manifest(kind, name)["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container(kind, name)["securityContext"]["readOnlyRootFilesystem"] is True
        ports = {port["name"] for port in container(kind, name)["ports"]}
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            for check in container(kind, name).get(probe, {}).values():
                assert not isinstance(check, dict) or check["port"] in ports


def test_the_hook_before_a_stop_drains_the_broker_and_waits_for_its_end(tmp_path: Path) -> None:
    hook = container("StatefulSet", "nsqd")["lifecycle"]["preStop"]["exec"]["command"]
    running = Process(tmp_path, "--http-address=127.0.0.1:0")
    try:
        port = running.wait_for(r"HTTP: listening on 127\.0\.0\.1:(\d+)")[1]
        with BlockingNsqClient(running.address) as client:
            assert client.ask(b"SUB t c\n") == b"OK"
        done = subprocess.run([sys.executable, "-c", hook[2].replace("4151", port)], capture_output=True, timeout=90)
        assert done.returncode == 0, done.stderr
        assert running.ended() == 0
        assert "NSQ: drained" in running.said
    finally:
        running.process.kill()
        running.process.communicate()


# --- systemd ----------------------------------------------------------------------------------------------------------


def test_the_unit_file_of_nsqlookupd_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "nsqlookupd.service")
    program, *argv = unit["Service"]["ExecStart"].split()
    assert Path(program).name == "nsqlookupd"
    assert set(read_flags(NsqlookupdOptions, argv)) == {"config"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("name", ["nsqd", "nsqlookupd", "nsqadmin"])
def test_systemd_understands_the_unit(name: str, tmp_path: Path) -> None:
    # With a program that exists, which is all that it looks for outside of the file.
    unit = tmp_path / f"{name}.service"
    unit.write_text((DEPLOY / f"{name}.service").read_text().replace(f"/opt/flintmq/bin/{name}", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
