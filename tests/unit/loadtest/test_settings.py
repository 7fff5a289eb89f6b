"""Profiles of load tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.prompts import read_prompts
from loadtest.settings import PROFILES, Stack, read_profile

VALID = """\
shape: {kind: steady, num_users: 2, seconds: 3}
slo: {ttft_ms: 100}
tenants: [{name: a, protocol: grpc, wait_s: [0, 1]}]
"""


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_that_ships_can_be_read_and_has_prompts_of_its_categories(path: Path) -> None:
    profile = read_profile(path.stem)
    categories = {prompt.category for prompt in read_prompts(PROFILES.parent / profile.prompts)}
    assert all(set(tenant.categories) <= categories for tenant in profile.tenants)


def test_a_profile_becomes_what_it_says(tmp_path: Path) -> None:
    profile = read_profile(_file(tmp_path, VALID))
    assert (profile.shape.users(0, [], profile.slo), profile.slo.ttft_ms) == (2, 100)
    assert profile.tenants[0].wait_s == (0, 1)


@pytest.mark.parametrize(
    ("added", "stack"),
    [
        ("", Stack(targets=1, drafts=1)),
        ("faults: {every_s: 5}\n", Stack(targets=2, drafts=2)),
        ("faults: {every_s: 5}\nstack: {targets: 3}\n", Stack(targets=3, drafts=1)),
    ],
)
def test_with_faults_a_stack_has_two_of_each_unless_told(tmp_path: Path, added: str, stack: Stack) -> None:
    assert read_profile(_file(tmp_path, added + VALID)).stack == stack


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("steady", "wavy", "shape: Input tag 'wavy'"),
        ("num_users: 2", "num_users: 0", "num_users"),
        ("seconds: 3", "minutes: 3", "shape.steady.minutes"),
        (", seconds: 3", "", "shape.steady.seconds: Field required"),
        ("ttft_ms: 100", "ttft: 100", "slo.ttft:"),
        ("ttft_ms: 100", "ttft_ms: -1", "ttft_ms"),
        ("ttft_ms: 100", "ttft_ms: [1]", "slo"),
        ("grpc", "smtp", "protocol"),
        ("protocol: grpc", "endpoint: embeddings", "endpoint"),
        ("protocol: grpc", "body: [1]", "body"),
        ("grpc", "grpc, body: {n: 1}", "body"),
        ("[0, 1]", "[2, 1]", "wait_s"),
        ("name: a", "nome: a", "tenants.0.nome"),
        ("tenants: [{name: a, protocol: grpc, wait_s: [0, 1]}]", "", "tenants"),
        ("slo:", "faults: {every_s: 0}\nslo:", "every_s"),
        ("slo:", "faults: {every_s: 5, roles: [queen]}\nslo:", "roles"),
        ("slo:", "min_goodput: 2\nslo:", "min_goodput"),
        ("slo:", "stack: {targets: 0}\nslo:", "stack.targets"),
    ],
)
def test_what_a_profile_may_not_say_is_refused_by_name(tmp_path: Path, old: str, new: str, named: str) -> None:
    assert old in VALID
    with pytest.raises(ValueError) as refused:
        read_profile(_file(tmp_path, VALID.replace(old, new)))
    assert named in str(refused.value)


def _file(directory: Path, text: str) -> str:
    file = directory / "own.yaml"
    file.write_text(text)
    return str(file)
