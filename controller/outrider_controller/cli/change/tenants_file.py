"""tenants.yaml as messages. What the file cannot say is refused here, what may not be written by the control plane."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.configuration import ConfigError, read_mapping
from outrider.protocol.limits import MAX_TENANTS_AT_ONCE, MIN_WEIGHT
from outrider.rpc.v1 import sequence_pb2, tenants_pb2

from outrider_controller.cli.exits import CommandError, ExitCode

MAX_FILE_BYTES = 16 << 20
_FIELDS = {
    "name": str,
    "models": list,
    "weight": float,
    "quota": dict,
    "speculation": dict,
    "receipts": bool,
    "pacing": str,
    "samples": str,
}
_QUOTA = {"requests_per_second": float, "tokens_per_minute": int, "concurrent_requests": int} | dict.fromkeys(
    ("burst_requests", "burst_tokens"), int
)
PACINGS = {"off": tenants_pb2.PACING_UNSPECIFIED, "constant": tenants_pb2.PACING_CONSTANT}
SAMPLES = {
    "off": sequence_pb2.SAMPLE_CONSENT_UNSPECIFIED,
    "acceptance": sequence_pb2.SAMPLE_CONSENT_ACCEPTANCE,
    "text": sequence_pb2.SAMPLE_CONSENT_TEXT,
}
_CHOICES: dict[str, Mapping[str, int]] = {"pacing": PACINGS, "samples": SAMPLES}
_SPECULATION = {
    "max_draft_tokens": int,
    "max_wait_ms": int,
    "weight": float,
    "min_acceptance": float,
    "on_counts_as_auto": bool,
}
_KINDS: dict[type, str] = {
    str: "text",
    list: "a list",
    float: "a number",
    dict: "a mapping",
    int: "a whole number",
    bool: "true or false",
}


def read_tenants(file: Path) -> list[tenants_pb2.Tenant]:
    """The tenants that the file lists under `tenants`. Raises CommandError that names the file and the field."""
    try:
        document = read_mapping(file, MAX_FILE_BYTES)
    except ConfigError as error:
        raise _refused(str(error)) from None
    top = _mapping(f"{file}", document, {"tenants": list})
    if "tenants" not in top:
        raise _refused(f"{file}: tenants: is missing")
    if len(top["tenants"]) > MAX_TENANTS_AT_ONCE:
        raise _refused(f"{file}: tenants: {len(top['tenants'])}; at most {MAX_TENANTS_AT_ONCE} in one file")
    return [_tenant(f"{file}: tenants[{i}]", given) for i, given in enumerate(top["tenants"])]


def _tenant(where: str, given: Any) -> tenants_pb2.Tenant:
    fields = _mapping(where, _with_off(given), _FIELDS)
    _check_weight(where, fields)
    quota = _mapping(f"{where}.quota", fields.pop("quota", {}), _QUOTA)
    if "speculation" in fields:
        speculation = _mapping(f"{where}.speculation", fields.pop("speculation"), _SPECULATION)
        _check_weight(f"{where}.speculation", speculation)
        fields["speculation"] = tenants_pb2.SpeculationPolicy(**speculation)
    for name in _CHOICES.keys() & fields.keys():
        fields[name] = _one_of(f"{where}.{name}", fields[name], _CHOICES[name])
    for i, model in enumerate(fields.get("models", [])):
        _check_kind(f"{where}.models[{i}]", model, str)
    try:
        return tenants_pb2.Tenant(**fields, quota=tenants_pb2.Quota(**quota))
    except (ValueError, TypeError) as error:
        raise _refused(f"{where}: {error}") from None


def _with_off(given: Any) -> Any:
    """YAML 1.1 reads `off` as false."""
    unquoted = {name: "off" for name in _CHOICES if isinstance(given, dict) and given.get(name) is False}
    return given | unquoted if unquoted else given


def _one_of(where: str, given: str, known: Mapping[str, int]) -> int:
    if given not in known:
        raise _refused(f"{where}: {given[:80]!r} is none of {', '.join(known)}")
    return known[given]


def _mapping(where: str, given: Any, known: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a mapping, each of its kind."""
    if not isinstance(given, dict):
        raise _refused(f"{where}: has to be a mapping, with {', '.join(known)}")
    for name, value in given.items():
        if name not in known:
            raise _refused(f"{where}: {str(name)[:80]!r} is not a field; the fields are {', '.join(known)}")
        _check_kind(f"{where}.{name}" if "[" in where else f"{where}: {name}", value, known[name])
    return dict(given)


def _check_weight(where: str, fields: Mapping[str, Any]) -> None:
    # A message cannot tell 0 from none.
    if fields.get("weight") == 0:
        raise _refused(f"{where}.weight: 0 is below {MIN_WEIGHT:g}; leave it out for the default")


def _check_kind(where: str, value: Any, kind: type) -> None:
    if kind is int and isinstance(value, int) and not 0 <= value < 2**63:
        raise _refused(f"{where}: {value} is out of range")
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or isinstance(value, bool) is not (kind is bool):
        raise _refused(f"{where}: {str(value)[:80]!r} is not {_KINDS[kind]}")


def _refused(message: str) -> CommandError:
    return CommandError(message, ExitCode.USAGE, reason="INVALID_FILE")
