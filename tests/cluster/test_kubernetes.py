"""The manifests fit each other, and the server: its flags, its routes, its metrics and its way to end."""

from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import yaml

from tokenwright.cli.commands.serve import serve
from tokenwright.cluster.publisher import check_address
from tokenwright.serve import operations
from tokenwright.serve.service import metrics
from tokenwright.serve.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "kubernetes.yaml"
API = {  # kind: its version and the fields of its spec, of the published APIs
    "Deployment": ("apps/v1", {"replicas", "selector", "strategy", "template"}),
    "Service": ("v1", {"selector", "ports"}),
    "InferencePool": ("inference.networking.k8s.io/v1", {"selector", "targetPorts", "endpointPickerRef"}),
    "HorizontalPodAutoscaler": (
        "autoscaling/v2",
        {"scaleTargetRef", "minReplicas", "maxReplicas", "metrics", "behavior"},
    ),
    "PodDisruptionBudget": ("policy/v1", {"maxUnavailable", "selector"}),
}


@pytest.fixture(scope="module")
def manifests():
    return {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def pod(manifests):
    return manifests["Deployment"]["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod):
    [found] = pod["spec"]["containers"]
    return found


def flags(container):
    return dict(one.removeprefix("--").split("=", 1) for one in container["args"] if one.startswith("--"))


def test_every_kind_has_the_version_and_the_fields_of_its_api(manifests):
    assert manifests.keys() == API.keys()
    for kind, (version, known) in API.items():
        assert manifests[kind]["apiVersion"] == version
        assert manifests[kind].keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert manifests[kind]["spec"].keys() == known


def test_all_select_the_pods(manifests, pod):
    labels = pod["metadata"]["labels"]
    for kind in ("Deployment", "InferencePool", "PodDisruptionBudget"):
        assert manifests[kind]["spec"]["selector"] == {"matchLabels": labels}
    assert manifests["Service"]["spec"]["selector"] == labels
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": manifests["Deployment"]["metadata"]["name"],
    }


def test_ports_and_volumes_are_those_of_the_container(manifests, pod, container):
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert manifests["InferencePool"]["spec"]["targetPorts"] == [{"number": ports["http"]}]
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    _, port = check_address(flags(container)["kv-events"])
    assert (ports["kv-events"], ports["kv-replay"]) == (port, port + 1)
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}


def test_flags_are_those_of_the_command(container):
    named = {one.replace("-", "_") for one in flags(container)}
    assert named <= set(signature(serve).parameters)
    assert named - {one.name for one in fields(Settings)} == {"kv_memory"}
    Settings(drain_timeout=float(flags(container)["drain-timeout"]))


def test_probes_ask_routes_of_the_server(container):
    source = Path(operations.__file__).read_text(encoding="utf-8")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert f'"{asked["path"]}"' in source and asked["port"] == "http"


def test_a_pod_has_the_time_to_drain(pod, container):
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drains = float(flags(container)["drain-timeout"])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= waits + drains + 5


def test_it_scales_by_metrics_that_the_server_has(manifests):
    source = Path(metrics.__file__).read_text(encoding="utf-8")
    for one in manifests["HorizontalPodAutoscaler"]["spec"]["metrics"]:
        name = one["pods"]["metric"]["name"].removeprefix("tokenwright_")
        assert f'_gauge("{name}"' in source


@pytest.fixture(scope="module")
def ray_service():
    return yaml.safe_load((DOCS / "ray.yaml").read_text(encoding="utf-8"))


def test_the_service_of_ray_has_the_fields_of_its_api(ray_service):
    assert (ray_service["apiVersion"], ray_service["kind"]) == ("ray.io/v1", "RayService")
    assert ray_service["spec"].keys() == {"serveConfigV2", "rayClusterConfig"}
    cluster = ray_service["spec"]["rayClusterConfig"]
    assert cluster.keys() == {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    [workers] = cluster["workerGroupSpecs"]
    assert workers.keys() == {*cluster["headGroupSpec"], "groupName", "replicas", "minReplicas", "maxReplicas"}


def test_each_worker_of_ray_has_a_replica_and_the_time_to_drain(ray_service):
    [application] = yaml.safe_load(ray_service["spec"]["serveConfigV2"])["applications"]
    [workers] = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    args, pod = application["args"], workers["template"]["spec"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (args["min_replicas"], args["max_replicas"])
    assert workers["replicas"] == args["min_replicas"]
    [container] = pod["containers"]
    free = int(container["resources"]["requests"]["cpu"]) - args["threads"]
    assert 1 <= free < args["threads"], "one replica fits, and an ingress beside it"
    assert pod["terminationGracePeriodSeconds"] >= args["drain_timeout"] + 5
