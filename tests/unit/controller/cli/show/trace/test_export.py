"""outrider trace export: what was asked for and is not there is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from click.testing import CliRunner
from outrider.rpc.v1 import control_pb2, control_pb2_grpc, trace_pb2
from outrider_controller.cli.app import cli
from outrider_controller.cli.exits import CommandError, ExitCode


class Remembers(control_pb2_grpc.ControlServiceServicer):
    def ExportTraces(
        self, request: control_pb2.ControlServiceExportTracesRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.ControlServiceExportTracesResponse]:
        trace = trace_pb2.RequestTrace(request_id="known")
        yield control_pb2.ControlServiceExportTracesResponse(trace=trace)


def test_a_request_that_no_router_remembers_is_an_error_beside_the_lines_of_the_others() -> None:
    with ThreadPoolExecutor() as threads:
        server = grpc.server(threads)
        control_pb2_grpc.add_ControlServiceServicer_to_server(Remembers(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        arguments = ["trace", "export", "known", "other", "--control", f"127.0.0.1:{port}"]
        result = CliRunner().invoke(cli, arguments)
        server.stop(None)
    assert json.loads(result.stdout)["request_id"] == "known"
    assert isinstance(result.exception, CommandError) and result.exception.exit_code is ExitCode.NOT_FOUND
    assert str(result.exception) == "no trace of an ended request: other"
