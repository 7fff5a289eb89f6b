"""Writes the manual's reference of the gRPC API from the comments in proto/: one page a file. conf.py calls it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

# Where comments lie, by the field numbers of FileDescriptorProto and of what it holds.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _VALUE, _METHOD, _NESTED_MESSAGE, _NESTED_ENUM = 2, 2, 2, 3, 4
_SYNTAX = 12
_Place = tuple[int, ...]


def write_reference(protos: Path, pages: Path) -> None:
    """A page in `pages` for each file below `protos`, and an index. Raises RuntimeError when one is malformed."""
    pages.mkdir(exist_ok=True)
    names = []
    for file in _compiled(protos).file:
        name = Path(file.name).stem
        (pages / f"{name}.md").write_text("\n".join(_page(file)) + "\n")
        names.append(name)
    index = ["# gRPC reference", "", "Made from the comments in `proto/`.", "", "```{toctree}", *sorted(names), "```"]
    (pages / "index.md").write_text("\n".join(index) + "\n")


def _compiled(protos: Path) -> FileDescriptorSet:
    sources = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    with tempfile.NamedTemporaryFile() as out:
        includes = [f"-I{protos}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
        if protoc.main(["protoc", *includes, "--include_source_info", f"--descriptor_set_out={out.name}", *sources]):
            raise RuntimeError(f"{protos}: protoc refused it")
        return FileDescriptorSet.FromString(Path(out.name).read_bytes())


def _page(file: FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(one.path): _prose(one.leading_comments) for one in file.source_code_info.location}
    yield from (f"# {file.name.rsplit('/', 1)[-1]}", "", comments.get((_SYNTAX,), ""), "")
    for i, service in enumerate(file.service):
        yield from _service(service, comments, (_SERVICE, i))
    for i, message in enumerate(file.message_type):
        yield from _message(message, message.name, comments, (_MESSAGE, i))
    for i, enum in enumerate(file.enum_type):
        yield from _enum(enum, enum.name, comments, (_ENUM, i))


def _service(service: ServiceDescriptorProto, comments: dict[_Place, str], place: _Place) -> Iterator[str]:
    yield from (f"## {service.name}", "", comments.get(place, ""), "", "| RPC | takes | gives | |", "|---|---|---|---|")
    for i, method in enumerate(service.method):
        takes = _streamed(method.input_type, method.client_streaming)
        gives = _streamed(method.output_type, method.server_streaming)
        yield f"| `{method.name}` | {takes} | {gives} | {_cell(comments, (*place, _METHOD, i))} |"
    yield ""


def _message(message: DescriptorProto, name: str, comments: dict[_Place, str], place: _Place) -> Iterator[str]:
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    yield from (f"## {name}", "", comments.get(place, ""), "")
    if message.field:
        yield from ("| field | type | |", "|---|---|---|")
    for i, field in enumerate(message.field):
        kind = _kind(field, entries)
        yield f"| `{field.name}` | {kind} | {_cell(comments, (*place, _FIELD, i))} |"
    yield ""
    for i, nested in enumerate(message.nested_type):
        if nested.name not in entries:
            yield from _message(nested, f"{name}.{nested.name}", comments, (*place, _NESTED_MESSAGE, i))
    for i, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{name}.{enum.name}", comments, (*place, _NESTED_ENUM, i))


def _enum(enum: EnumDescriptorProto, name: str, comments: dict[_Place, str], place: _Place) -> Iterator[str]:
    yield from (f"## {name}", "", comments.get(place, ""), "", "| value | number | |", "|---|---|---|")
    for i, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {_cell(comments, (*place, _VALUE, i))} |"
    yield ""


def _kind(field: FieldDescriptorProto, entries: dict[str, DescriptorProto]) -> str:
    if entry := entries.get(field.type_name.rsplit(".", 1)[-1]):
        return f"map of {_type(entry.field[0])} to {_type(entry.field[1])}"
    many = field.label == FieldDescriptorProto.LABEL_REPEATED
    return ("repeated " if many else "optional " if field.proto3_optional else "") + _type(field)


def _type(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return f"`{field.type_name.removeprefix('.outrider.rpc.v1.')}`"
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _streamed(type_name: str, streaming: bool) -> str:
    return ("stream of " if streaming else "") + f"`{type_name.rsplit('.', 1)[-1]}`"


def _cell(comments: dict[_Place, str], place: _Place) -> str:
    return comments.get(place, "").replace("\n", " ").replace("|", "\\|")


def _prose(comment: str) -> str:
    return "\n".join(line.strip() for line in comment.strip().splitlines())
