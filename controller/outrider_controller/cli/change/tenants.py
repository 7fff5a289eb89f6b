"""outrider apply, create, revoke and delete; get of tenants and keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from outrider.rpc.enums import value_name
from outrider.rpc.v1 import control_pb2, tenants_pb2, worker_pb2

from outrider_controller.cli.asking import Nouns, confirm, seconds, yes_option
from outrider_controller.cli.change.certificates import create_certificates, create_redis_users
from outrider_controller.cli.change.tenants_file import read_tenants, switches
from outrider_controller.cli.clusters.control import Control, ask_control, control_options
from outrider_controller.cli.drafts.versions import delete_drafts
from outrider_controller.cli.exits import ExitCode
from outrider_controller.cli.output import emit, moment, named, note, print_rows
from outrider_controller.cli.watching import limit_option, list_options, show_rows

KEY_COLUMNS = ("id", "tenant", "scopes", "expires", "valid")
_SCOPES = {name.removeprefix("KEY_SCOPE_").lower(): value for name, value in tenants_pb2.KeyScope.items() if value}
_STDIN = Path("/dev/stdin")
_PAGE, _ALL = 1000, 1_000_000
_CHANGES = {
    control_pb2.CHANGE_CREATED: "created",
    control_pb2.CHANGE_UPDATED: "updated",
    control_pb2.CHANGE_NONE: "unchanged",
}
RATES = ("requests_per_second", "tokens_per_minute", "concurrent_requests")
QUOTAS = (*RATES, "burst_requests", "burst_tokens")


@click.command("apply")
@click.option(
    "-f",
    "--filename",
    "files",
    multiple=True,
    required=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="May be repeated; - is stdin.",
)
@click.option("--dry-run", is_flag=True, help="Check everything and change nothing.")
@control_options("table", "json", "yaml", "name")
def apply(files: tuple[str, ...], dry_run: bool, control: str, output: str) -> None:
    """Create or change the tenants that files list, all of them or none.

    Tenants that no file names stay as they are. Exit code 2 if a file, or a field in it, is invalid.
    """
    tenants = [tenant for file in files for tenant in read_tenants(_STDIN if file == "-" else Path(file))]
    request = control_pb2.PutTenantsRequest(tenants=tenants, dry_run=dry_run)
    answer = ask_control(control, lambda stub: stub.PutTenants(request), ", ".join(files))
    rows = [
        {"name": change.name, "change": _CHANGES.get(change.change, str(change.change)), "version": change.version}
        for change in answer.changes
    ]
    for line in _unserved(tenants, ask_control(control, _models)):
        note(line)
    if dry_run:
        note("nothing was changed: --dry-run")
    print_rows("apply", "tenants", rows, ("name", "change", "version"), output)


async def _models(stub: Control) -> set[str]:
    """Those that targets have now."""
    request = control_pb2.ListWorkersRequest(role=worker_pb2.WORKER_ROLE_TARGET)
    return {worker.info.model for worker in (await stub.ListWorkers(request)).workers if not worker.refused}


def _unserved(tenants: Iterable[tenants_pb2.Tenant], served: Collection[str]) -> Iterator[str]:
    """It may be misspelt, or still to come."""
    there = ", ".join(sorted(served)) or "none"
    for tenant in tenants:
        for model in tenant.models:
            if model not in served:
                yield f"{tenant.name}: models: no target has {model} now; there are: {there}"


@click.group("create", cls=Nouns)
def create() -> None:
    """Make API keys, certificates, or users of Redis."""


create.add_command(create_certificates)
create.add_command(create_redis_users)


def _unix_s(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A span from now (30d, 12h) or a moment (ISO 8601) as Unix time; 0 for none."""
    if not value:
        return 0
    if (span_s := seconds(value)) is not None:
        return int(time.time()) + span_s
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a duration such as 30d nor a date such as 2030-01-31") from None
    found = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    # 0 would be none.
    if found <= time.time():
        raise click.BadParameter(f"{value} is in the past")
    return found


@create.command("key")
@click.argument("tenant")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(list(_SCOPES)), help="May be repeated; default: infer."
)
@click.option("--expires", "not_after", default="", callback=_unix_s, metavar="WHEN", help="30d, 12h, or 2030-01-31.")
@control_options("text", "json", "yaml")
def create_key(tenant: str, scopes: tuple[str, ...], not_after: int, control: str, output: str) -> None:
    """Make a key for TENANT and print it, this once: only its hash is kept.

    Once there is a key, gateways require one from every client.
    """
    scope_values = [_SCOPES[scope] for scope in scopes]
    request = control_pb2.CreateKeyRequest(tenant=tenant, scopes=scope_values, not_after_unix_s=not_after)
    answer = ask_control(control, lambda stub: stub.CreateKey(request))
    if output == "text":
        note(f"{answer.info.id} of {tenant}; it is not shown again")
    emit("key", {"key": answer.key, **key_row(answer.info)}, output, answer.key)


@click.group("revoke", cls=Nouns)
def revoke() -> None:
    """Take API keys back."""


@revoke.command("key")
@click.argument("key_id", metavar="ID")
@yes_option
@control_options("text", "json", "yaml")
def revoke_key(key_id: str, yes: bool, control: str, output: str) -> None:
    """Revoke a key for good, by its id. A gateway that has just checked it accepts it for up to 5 s more."""
    confirm(f"Revoke {key_id} for good?", yes)
    revoked = ask_control(control, lambda stub: stub.RevokeKey(control_pb2.RevokeKeyRequest(id=key_id)))
    emit("revoked", {"key": key_row(revoked.info)}, output, f"{revoked.info.id} revoked")


@click.group("delete", cls=Nouns)
def delete() -> None:
    """Delete tenants, what targets remember or record of their texts, or versions of drafts."""


delete.add_command(delete_drafts)


@delete.command("tenant")
@click.argument("name")
@yes_option
@control_options("text", "json", "yaml")
def delete_tenant(name: str, yes: bool, control: str, output: str) -> int:
    """Delete a tenant, revoke its keys, and erase its samples and history.

    A tenant that gets this name later is another one. Exit code 5 while not all have erased, as of `outrider delete
    samples`.
    """
    confirm(f"Delete {name}, revoke its keys, and erase what is kept of its texts?", yes)
    deleted = ask_control(control, lambda stub: stub.DeleteTenant(control_pb2.DeleteTenantRequest(name=name)))
    number, away = deleted.num_revoked_keys, list(deleted.pending)
    row = {"name": name, "revoked_keys": number, "pending": away}
    emit("deleted", row, output, f"{name} deleted, {number} keys revoked{_left(away)}")
    return ExitCode.UNAVAILABLE if away else ExitCode.OK


@delete.command("history")
@click.argument("tenant")
@yes_option
@control_options("text", "json", "yaml")
def delete_history(tenant: str, yes: bool, control: str, output: str) -> int:
    """Make targets and routers forget TENANT's texts: what suffix lookups draft from, and traces.

    Running requests are not remembered either. Exit code 5 while somebody has not answered: they are asked until they
    do, and `outrider get erasures` names them.
    """
    confirm(f"Erase what targets remember of the texts of {tenant}?", yes)
    return _erase(control, control_pb2.DeleteHistoryRequest(tenant=tenant), "texts", output)


@delete.command("samples")
@click.argument("tenant")
@yes_option
@control_options("text", "json", "yaml")
def delete_samples(tenant: str, yes: bool, control: str, output: str) -> int:
    """Erase the samples of TENANT on every target's volume, with what `outrider distill` keeps beside them.

    The order stands: nothing of a request from before is recorded later, and a volume that is away now is erased when
    a target has it again. Later requests are recorded, unless the tenant's record says `samples: off`.
    Exit code 5 while not all have erased: `outrider get erasures` names them, and they are asked until they do.
    """
    confirm(f"Erase all samples of {tenant}?", yes)
    return _erase(control, control_pb2.DeleteHistoryRequest(tenant=tenant, samples=True), "samples", output)


@delete.command("volume")
@click.argument("volume")
@yes_option
@control_options("text", "json", "yaml")
def delete_volume(volume: str, yes: bool, control: str, output: str) -> None:
    """Wait no longer for a VOLUME of samples that does not exist any more, as `outrider get erasures` names it.

    If a target has it again, it is known again, and all orders hold.
    """
    confirm(f"Does {volume} exist no more?", yes)
    ask_control(control, lambda stub: stub.DeleteVolume(control_pb2.DeleteVolumeRequest(volume_id=volume)))
    emit("deleted", {"volume": volume}, output, f"{volume} is not waited for")


def _erase(control: str, request: control_pb2.DeleteHistoryRequest, what: str, output: str) -> int:
    erased = ask_control(control, lambda stub: stub.DeleteHistory(request))
    away, named = list(erased.pending), list(erased.unreachable_targets)
    row = {"tenant": request.tenant, f"num_{what}": erased.num_texts, "unreachable_targets": named, "pending": away}
    kind = "deleted_history" if what == "texts" else f"deleted_{what}"
    emit(kind, row, output, f"{request.tenant}: {erased.num_texts} {what} erased{_left(away)}")
    return ExitCode.UNAVAILABLE if away else ExitCode.OK


def _left(away: Sequence[str]) -> str:
    return f"; not yet erased by {', '.join(away)}: see outrider get erasures" if away else ""


@click.command("tenants")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@limit_option()
@list_options
def get_tenants(names: tuple[str, ...], limit: int, watch: bool, control: str, output: str) -> None:
    """List tenants by name. With NAMEs only those; exit code 3 if one of them does not exist."""

    async def listed(stub: Control) -> tuple[list[tenants_pb2.Tenant], int]:
        if names:
            calls = [stub.GetTenant(control_pb2.GetTenantRequest(name=name)) for name in names]
            return [answer.tenant for answer in await asyncio.gather(*calls)], len(names)
        found, last = await paged(stub.ListTenants, control_pb2.ListTenantsRequest(), "tenants", limit)
        return found, last.num_tenants

    def read() -> list[dict[str, Any]]:
        found, total = ask_control(control, listed)
        if total > len(found):
            note(f"{len(found)} of {total} tenants (--limit)")
        return [tenant_row(tenant) for tenant in found]

    shown = ("name", "weight", "models", *RATES)
    wide = ("name", "weight", "models", *QUOTAS, "version", "id")
    show_rows("tenants", read, wide if output == "wide" else shown, output, watch=watch)


@click.command("keys")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--tenant", default="", metavar="NAME", help="Only its keys.")
@limit_option()
@list_options
def get_keys(ids: tuple[str, ...], tenant: str, limit: int, watch: bool, control: str, output: str) -> None:
    """List API keys by tenant: their ids, what they open, and until when. Never the keys.

    With IDs only those; exit code 3 if one of them does not exist.
    """

    def read() -> list[dict[str, Any]]:
        keys = ask_control(control, lambda stub: all_keys(stub, tenant, _ALL if ids else limit))
        return named(ids, "key", [key_row(key) for key in keys])

    shown = (*KEY_COLUMNS, "created") if output == "wide" else KEY_COLUMNS
    show_rows("keys", read, shown, output, watch=watch)


async def all_keys(stub: Control, tenant: str = "", limit: int = _ALL) -> list[tenants_pb2.ApiKey]:
    """Of one tenant or of all."""
    request = control_pb2.ListKeysRequest(tenant=tenant)
    found: list[tenants_pb2.ApiKey] = (await paged(stub.ListKeys, request, "keys", limit))[0]
    return found


async def paged(
    ask: Callable[[Any], Awaitable[Any]], request: Any, rows: str, limit: int, name: str = ""
) -> tuple[list[Any], Any]:
    """So many of what a call gives under `rows`, page by page; and the last answer. `name`: only those of this name."""
    found: list[Any] = []
    while True:
        request.page_size = _PAGE if name else min(_PAGE, limit - len(found))
        answer = await ask(request)
        found += [row for row in getattr(answer, rows) if not name or row.name == name]
        request.page_token = answer.next_page_token
        if not request.page_token or len(found) >= limit:
            return found[:limit], answer


def tenant_row(tenant: tenants_pb2.Tenant) -> dict[str, Any]:
    quota = tenant.quota
    return {
        "name": tenant.name,
        "weight": round(tenant.weight, 4) or 1.0,
        "models": list(tenant.models),
        **{name: getattr(quota, name) if quota.HasField(name) else None for name in QUOTAS},  # type: ignore[arg-type]
        **switches(tenant),
        "version": tenant.version,
        "id": tenant.id,
    }


def key_row(key: tenants_pb2.ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": [value_name(tenants_pb2.KeyScope.DESCRIPTOR, scope) for scope in key.scopes],
        "created": moment(key.created_unix_s),
        "expires": moment(key.not_after_unix_s),
        "valid": not key.not_after_unix_s or time.time() < key.not_after_unix_s,
    }
