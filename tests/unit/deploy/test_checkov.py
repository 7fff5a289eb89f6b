"""What checkov says against the chart: nothing but what is listed here with its reason.

It brings some hundred packages, so it does not live in our environment: `make chart-check` makes it one of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.deploy.chart import CASES, Object, pod_specs, profile, rendered

CHECKOV = os.environ.get("CHECKOV", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not CHECKOV, reason="make chart-check installs checkov"),
]

EXCEPTIONS = {
    "CKV_K8S_11": "no CPU limits: throttling within a step delays every sequence of a batch; requests are set",
    "CKV_K8S_15": "images have a version, so a node that has one need not ask a registry that may be away",
    "CKV_K8S_21": "objects name no namespace: Helm puts them into the release's",
    "CKV_K8S_35": "a URL with a password goes in as `redis.urlSecret`, Ray's token as Ray wants it: a file is possible"
    " for neither",
    "CKV_K8S_43": "`image.digests` pins images; the chart cannot know digests of images that its user builds",
    "CKV_K8S_8": "the container of `helm test` runs once; the controller beside Ray's head ends when it cannot work",
    "CKV_K8S_9": "as for CKV_K8S_8; without Ray a router is no reason to take its pod's control plane out of a service",
}
# Of these checks only these workloads may fail.
_PLACES = {
    "CKV_K8S_8": {"demo-test", "demo-controller-head"},
    "CKV_K8S_9": {"demo-test", "demo-controller-head", "demo-controller"},
}


def _known(objects: list[Object]) -> list[Object]:
    """With the pods of a RayCluster in its place, which checkov does not know."""
    clusters = [found for found in objects if found["kind"] == "RayCluster"]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": _pod_name(labels), "labels": labels}, "spec": spec}
        for labels, spec in pod_specs(clusters)
    ]
    return [found for found in objects if found not in clusters] + pods


def _pod_name(labels: Object) -> str:
    return f"demo-controller-{labels['outrider/ray-node']}"


def test_checkov_finds_nothing_but_what_has_a_reason(tmp_path: Path) -> None:
    for name in CASES:
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(_known(rendered(profile(name)))))
    options = ("--framework", "kubernetes", "--compact", "--quiet", "--skip-download", "-o", "json")
    done = subprocess.run([CHECKOV, "-d", tmp_path, *options], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 2000 and not report["summary"]["parsing_errors"]
    failed = {(one["check_id"], one["resource"].split(".")[2]) for one in report["results"]["failed_checks"]}
    unexplained = {
        (check, place) for check, place in failed if check not in EXCEPTIONS or place not in _PLACES.get(check, {place})
    }
    assert unexplained == set()
    assert {check for check, _ in failed} == set(EXCEPTIONS), "an exception that nothing needs any more"
