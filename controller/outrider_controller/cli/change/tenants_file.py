"""tenants.yaml as messages. What the file cannot say is refused here, what may not be written by the control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message_factory import GetMessageClass
from outrider.configuration import ConfigError, read_mapping
from outrider.limits import MAX_TENANTS_AT_ONCE, MIN_WEIGHT
from outrider.rpc.enums import value_name
from outrider.rpc.v1 import control_pb2, tenants_pb2

from outrider_controller.cli.exits import CommandError, ExitCode

MAX_FILE_BYTES = 16 << 20
_OFF = "off"
# Those of the control plane and of its call.
_NOT_IN_FILES = ("version", "dry_run")
_WHOLE: tuple[Any, str] = (int, "a whole number")
_KINDS = {
    Field.CPPTYPE_STRING: (str, "text"),
    Field.CPPTYPE_FLOAT: (int | float, "a number"),
    Field.CPPTYPE_DOUBLE: (int | float, "a number"),
    Field.CPPTYPE_UINT32: _WHOLE,
    Field.CPPTYPE_UINT64: _WHOLE,
    Field.CPPTYPE_BOOL: (bool, "true or false"),
}


def read_tenants(file: Path) -> list[tenants_pb2.Tenant]:
    """The tenants that the file lists under `tenants`. Raises CommandError that names the file and the field."""
    try:
        document = read_mapping(file, MAX_FILE_BYTES)
        if not document:
            raise ConfigError("tenants: is missing")
        if isinstance(given := document.get("tenants"), list) and len(given) > MAX_TENANTS_AT_ONCE:
            raise ConfigError(f"tenants: {len(given)}; at most {MAX_TENANTS_AT_ONCE} in one file")
        return list(_message("", control_pb2.PutTenantsRequest, document).tenants)
    except ConfigError as error:
        message = str(error) if str(file) in str(error) else f"{file}: {error}"
        raise CommandError(message, ExitCode.USAGE, reason="INVALID_FILE") from None


def switches(tenant: tenants_pb2.Tenant) -> dict[str, bool | str]:
    """The fields of a record that switch something, as a file has them."""
    found: dict[str, bool | str] = {}
    for field in tenant.DESCRIPTOR.fields:
        value = getattr(tenant, field.name)
        if field.cpp_type == Field.CPPTYPE_BOOL:
            found[field.name] = value
        elif field.enum_type is not None:
            found[field.name] = value_name(field.enum_type, value) if value else _OFF
    return found


def _choices(enum: EnumDescriptor) -> dict[str, int]:
    """Its values, by their names in files."""
    return {value_name(enum, number) if number else _OFF: number for number in enum.values_by_number}


def _message(where: str, kind: Any, given: Any) -> Any:
    """The mapping as a message of this kind. Raises ConfigError, as all below."""
    fields = {field.name: field for field in kind.DESCRIPTOR.fields if field.name not in _NOT_IN_FILES}
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: has to be a mapping, with {', '.join(fields)}")
    message = kind()
    for name, value in given.items():
        if name not in fields:
            wrong = f"{where}: {name[:80]!r} is not a field; the fields are {', '.join(fields)}"
            raise ConfigError(wrong.removeprefix(": "))
        at = f"{where}.{name}".removeprefix(".")
        found = _value(at, fields[name], value)
        try:
            message.MergeFrom(kind(**{name: found}))
        except ValueError as error:
            raise ConfigError(f"{at}: {error}") from None
    return message


def _value(where: str, field: Field, given: Any) -> Any:
    if not isinstance(field.default_value, list):
        return _one(where, field, given)
    if not isinstance(given, list):
        raise ConfigError(f"{where}: {str(given)[:80]!r} is not a list")
    return [_one(f"{where}[{i}]", field, each) for i, each in enumerate(given)]


def _one(where: str, field: Field, given: Any) -> Any:
    if field.message_type is not None:
        return _message(where, GetMessageClass(field.message_type), given)
    if field.enum_type is not None:
        # YAML 1.1 reads `off` as false.
        choice, known = _OFF if given is False else str(given), _choices(field.enum_type)
        if choice not in known:
            raise ConfigError(f"{where}: {choice[:80]!r} is none of {', '.join(known)}")
        return known[choice]
    kind, meaning = _KINDS[field.cpp_type]
    if not isinstance(given, kind) or isinstance(given, bool) is not (kind is bool):
        raise ConfigError(f"{where}: {str(given)[:80]!r} is not {meaning}")
    if field.name == "weight" and given == 0:
        # A message cannot tell 0 from none.
        raise ConfigError(f"{where}: 0 is below {MIN_WEIGHT:g}; leave it out for the default")
    return given
