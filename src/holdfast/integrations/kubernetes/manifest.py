"""The objects of a run on Kubernetes: an indexed Job whose pods are hosts, etcd for its ledger, and what they need.

Pure. A pod runs `holdfast kubernetes start`, which ends by SIGTERM in order and with exit codes that the Job's policy
reads: docs/reference/errors.md. A pod that is lost is started again under its index, which is its host's name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import EXIT_BAD_INPUT, EXIT_INEXACT

LEDGER_MEMBERS = 3
CLIENT_PORT, PEER_PORT, METRICS_PORT = 2379, 2380, 9464
KEYS_PATH, HOME_PATH, DATA_PATH = "/etc/holdfast/keys", "/var/lib/holdfast", "/var/lib/etcd"
USER_ID = 10001
RETRIES = 20  # of a pod that fails by itself; one that is moved or preempted does not count
GRACE_MARGIN_S = 35  # beyond the notice: the step under way, the agents' end, and what Kubernetes takes itself
EXIT_TERMINATED = 143

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PodRun:
    """What a manifest is made of."""

    name: str
    image: str
    script: tuple[str, ...]  # and its arguments; with -m a module
    hosts: int
    workers: int
    checkpoint: str
    spares: int = 0
    notice_s: int = 25
    ledger: str = ""  # an etcd that is there already; empty: the manifest brings one
    namespace: str = ""
    cpu: str = ""
    memory: str = ""
    shared_memory: str = "2Gi"
    secrets: tuple[str, ...] = ()  # whose entries become variables: credentials of the storage
    keys: Mapping[str, bytes] = field(default_factory=dict)  # the files of `holdfast keys create`; none: they are there

    @property
    def ledger_name(self) -> str:
        return f"{self.name}-ledger"

    @property
    def keys_name(self) -> str:
        return f"{self.name}-keys"

    @property
    def url(self) -> str:
        members = (f"{self.ledger_name}-{number}.{self.ledger_name}:{CLIENT_PORT}" for number in range(LEDGER_MEMBERS))
        return self.ledger or f"etcd://{','.join(members)}"


def secret_command(name: str) -> str:
    """What makes the secret of a run's keys."""
    return f"kubectl create secret generic {name} --from-file=keys"


def objects_of(run: PodRun) -> list[Object]:
    found = [_secret(run)] if run.keys else []
    if not run.ledger:
        found += [_ledger_service(run), _ledger(run), _budget(run, run.ledger_name, {"maxUnavailable": 1})]
    found += [_hosts_service(run), _job(run)]
    if run.hosts > 1:
        # Of a Job's pods Kubernetes knows no scale, so it has to be told how many stay.
        found.append(_budget(run, run.name, {"minAvailable": run.hosts - 1}))
    return [*found, _network_policy(run)]


def _metadata(run: PodRun, name: str) -> Object:
    space = {"namespace": run.namespace} if run.namespace else {}
    return {"name": name, **space, "labels": {"app.kubernetes.io/name": name, "holdfast/run": run.name}}


def _labels(run: PodRun, name: str) -> Object:
    return {"app.kubernetes.io/name": name, "holdfast/run": run.name}


def _secret(run: PodRun) -> Object:
    data = {name: base64.b64encode(content).decode() for name, content in sorted(run.keys.items())}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(run, run.keys_name),
        "type": "Opaque",
        "immutable": True,
        "data": data,
    }


def _budget(run: PodRun, name: str, how_many: Object) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(run, name),
        "spec": {**how_many, "selector": {"matchLabels": _labels(run, name)}},
    }


def _service(run: PodRun, name: str, ports: list[Object]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(run, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # members of etcd look for each other before they are ready
            "selector": _labels(run, name),
            "ports": ports,
        },
    }


def _ledger_service(run: PodRun) -> Object:
    ports = [{"name": "client", "port": CLIENT_PORT}, {"name": "peer", "port": PEER_PORT}]
    return _service(run, run.ledger_name, ports)


def _hosts_service(run: PodRun) -> Object:
    return _service(run, run.name, [{"name": "metrics", "port": METRICS_PORT}])


def _network_policy(run: PodRun) -> Object:
    """The pods of the run talk to each other; from elsewhere only the numbers may be read."""
    everyone = {"matchLabels": {"holdfast/run": run.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(run, run.name),
        "spec": {
            "podSelector": everyone,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": everyone}]},
                {"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]},
            ],
        },
    }


def _security() -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "fsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


_CONTAINER_SECURITY: Object = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _spread(run: PodRun, name: str, *, must: bool) -> list[Object]:
    """Not all on one node: that would be one fault."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule" if must else "ScheduleAnyway",
            "labelSelector": {"matchLabels": _labels(run, name)},
        }
    ]


def _http_probe(path: str, port: int, *, period_s: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


# ---- the ledger


def _ledger(run: PodRun) -> Object:
    name = run.ledger_name
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(run, name),
        "spec": {
            "serviceName": name,
            "replicas": LEDGER_MEMBERS,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(run, name)},
            "template": {
                "metadata": {"labels": _labels(run, name)},
                "spec": {
                    "securityContext": _security(),
                    "topologySpreadConstraints": _spread(run, name, must=False),
                    "containers": [_ledger_container(run)],
                },
            },
            "volumeClaimTemplates": [
                {
                    "metadata": {"name": "data"},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
                }
            ],
        },
    }


def _ledger_container(run: PodRun) -> Object:
    name = run.ledger_name
    members = ",".join(f"{name}-{n}=http://{name}-{n}.{name}:{PEER_PORT}" for n in range(LEDGER_MEMBERS))
    return {
        "name": "etcd",
        "image": run.image,
        "command": ["etcd"],
        "args": [
            "--name=$(POD_NAME)",
            f"--data-dir={DATA_PATH}/data",
            f"--listen-client-urls=http://0.0.0.0:{CLIENT_PORT}",
            f"--advertise-client-urls=http://$(POD_NAME).{name}:{CLIENT_PORT}",
            f"--listen-peer-urls=http://0.0.0.0:{PEER_PORT}",
            f"--initial-advertise-peer-urls=http://$(POD_NAME).{name}:{PEER_PORT}",
            f"--initial-cluster={members}",
            f"--initial-cluster-token={name}",
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=100000",
        ],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [
            {"name": "client", "containerPort": CLIENT_PORT},
            {"name": "peer", "containerPort": PEER_PORT},
        ],
        "readinessProbe": _http_probe("/health", CLIENT_PORT, period_s=5, failures=3),
        "livenessProbe": {**_http_probe("/health", CLIENT_PORT, period_s=20, failures=30), "initialDelaySeconds": 60},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [{"name": "data", "mountPath": DATA_PATH}],
    }


# ---- the hosts


def _job(run: PodRun) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(run, run.name),
        "spec": {
            "completionMode": "Indexed",
            "completions": run.hosts,
            "parallelism": run.hosts,
            "backoffLimitPerIndex": RETRIES,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {
                "metadata": {"labels": _labels(run, run.name)},
                "spec": {
                    "subdomain": run.name,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": run.notice_s + GRACE_MARGIN_S,
                    "securityContext": _security(),
                    "topologySpreadConstraints": _spread(run, run.name, must=False),
                    "containers": [_host_container(run)],
                    "volumes": [
                        {"name": "keys", "secret": {"secretName": run.keys_name, "defaultMode": 0o440}},
                        {"name": "home", "emptyDir": {}},
                        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": run.shared_memory}},
                    ],
                },
            },
        },
    }


def _failure_rules() -> list[Object]:
    """The first that fits counts. Whatever fits none is counted, and tried again."""
    return [
        {
            "action": "FailJob",  # a second try would come to the same
            "onExitCodes": {"containerName": "host", "operator": "In", "values": [EXIT_BAD_INPUT, EXIT_INEXACT]},
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",  # it was asked to leave, and did so in order
            "onExitCodes": {"containerName": "host", "operator": "In", "values": [EXIT_TERMINATED]},
        },
    ]


def _host_container(run: PodRun) -> Object:
    words = ["kubernetes", "start", "--workers", str(run.workers), "--checkpoint", run.checkpoint]
    words += ["--spares", str(run.spares)] if run.spares else []
    words += ["--notice", f"{run.notice_s}s", "--metrics", f"0.0.0.0:{METRICS_PORT}", *run.script]
    wanted = {name: value for name, value in (("cpu", run.cpu), ("memory", run.memory)) if value}
    sources = [{"secretRef": {"name": name}} for name in run.secrets]
    return {
        "name": "host",
        "image": run.image,
        "args": words,
        "env": [
            {"name": "HOLDFAST_RUN", "value": run.name},
            {"name": "HOLDFAST_LEDGER", "value": run.url},
            {"name": "HOLDFAST_KEYS", "value": KEYS_PATH},
            {"name": "HOLDFAST_DIR", "value": HOME_PATH},
        ],
        **({"envFrom": sources} if sources else {}),
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        # Until the ledger serves, the entry point waits; then the agent answers for as long as it lives.
        "startupProbe": _http_probe("/metrics", METRICS_PORT, period_s=5, failures=120),
        "livenessProbe": _http_probe("/metrics", METRICS_PORT, period_s=20, failures=6),
        **({"resources": {"requests": wanted, "limits": wanted}} if wanted else {}),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "keys", "mountPath": KEYS_PATH, "readOnly": True},
            {"name": "home", "mountPath": HOME_PATH},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
