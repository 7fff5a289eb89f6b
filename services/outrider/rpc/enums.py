"""Values of enums in messages, as people read them."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor


def value_name(kind: EnumDescriptor, value: int) -> str:
    """`running` of ROLLOUT_STATE_RUNNING. Of a value that only a later release knows, its number."""
    known = kind.values_by_number.get(value)
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(value) if known is None else known.name.removeprefix(prefix).lower()
