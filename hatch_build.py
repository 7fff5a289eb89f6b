"""Compiles proto/ into services/ whenever the package is built or installed; generated code is not committed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTO_ROOT = "proto"
OUTPUT_ROOT = "services"


def compile_protos(root: Path) -> list[Path]:
    """Writes *_pb2.py, *_pb2_grpc.py and their stubs beside outrider/rpc/v1; returns what was written."""
    import grpc_tools
    from grpc_tools import protoc

    sources = sorted((root / PROTO_ROOT).rglob("*.proto"))
    output = root / OUTPUT_ROOT
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{root / PROTO_ROOT}",
        f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet:{output}",
        *map(str, sources),
    ]
    if not (scripts / "protoc-gen-mypy").exists():
        # An isolated build puts scripts elsewhere; typed stubs are for developers only.
        arguments = [a for a in arguments if "mypy" not in a]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    return [path for path in (output / "outrider" / "rpc").rglob("*_pb2*") if path.is_file()]


class CompileProtos(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before hatchling collects files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for path in compile_protos(Path(self.root)):
            build_data["artifacts"].append(str(path.relative_to(self.root)))


if __name__ == "__main__":
    compile_protos(Path(__file__).parent)
