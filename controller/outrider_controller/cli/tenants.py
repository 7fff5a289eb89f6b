"""outrider apply, create, revoke and delete; get and describe of tenants and keys."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from outrider.rpc.v1 import control_pb2, tenants_pb2

from outrider_controller.cli.certificates import create_certificates
from outrider_controller.cli.control import Control, ask_control, control_option
from outrider_controller.cli.output import emit_json, moment, note, output_option, print_rows
from outrider_controller.cli.redis_users import create_redis_users
from outrider_controller.cli.spans import seconds
from outrider_controller.cli.tenants_file import read_tenants
from outrider_controller.cli.watching import show_rows, watch_option

KEY_COLUMNS = ("id", "tenant", "scopes", "created", "expires", "valid")
_SCOPES = {name.removeprefix("KEY_SCOPE_").lower(): value for name, value in tenants_pb2.KeyScope.items() if value}
_SCOPE_NAMES = {value: name for name, value in _SCOPES.items()}
_CHANGES = {
    control_pb2.CHANGE_CREATED: "created",
    control_pb2.CHANGE_UPDATED: "updated",
    control_pb2.CHANGE_NONE: "unchanged",
}
_QUOTAS = ("requests_per_second", "tokens_per_minute", "concurrent_requests")


@click.command("apply")
@click.option("-f", "--filename", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="Check everything and change nothing.")
@control_option
@output_option("table", "json", "name")
def apply(filename: Path, dry_run: bool, control: str, output: str) -> None:
    """Make or change the tenants that a file lists, all of them or none.

    Tenants that the file does not name stay as they are. Exit code 2 when the file, or a field in it, makes no sense.
    """
    request = control_pb2.PutTenantsRequest(tenants=read_tenants(filename), dry_run=dry_run)
    answer = ask_control(control, lambda stub: stub.PutTenants(request), str(filename))
    rows = [
        {"name": change.name, "change": _CHANGES[change.change], "version": change.version} for change in answer.changes
    ]
    if dry_run:
        note("nothing was changed: --dry-run")
    print_rows("apply", "tenants", rows, ("name", "change", "version"), output)


@click.group("create")
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
        raise click.BadParameter(f"{value!r} is neither a span such as 30d nor a moment such as 2030-01-31") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


@create.command("key")
@click.argument("tenant")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(list(_SCOPES)), help="May be repeated; default: infer."
)
@click.option("--expires", "not_after", default="", callback=_unix_s, metavar="WHEN", help="30d, 12h, or 2030-01-31.")
@control_option
@output_option("table", "json")
def create_key(tenant: str, scopes: tuple[str, ...], not_after: int, control: str, output: str) -> None:
    """Make a key for TENANT and print it, this once: only its hash is kept.

    With a tenant's first key gateways begin to ask everybody for one.
    """
    scope_values = [_SCOPES[scope] for scope in scopes]
    request = control_pb2.CreateKeyRequest(tenant=tenant, scopes=scope_values, not_after_unix_s=not_after)
    answer = ask_control(control, lambda stub: stub.CreateKey(request))
    if output == "json":
        emit_json("key", {"key": answer.key, **key_row(answer.info)})
        return
    note(f"{answer.info.id} of {tenant}; it is not shown again")
    click.echo(answer.key)


@click.group("revoke")
def revoke() -> None:
    """Take API keys back."""


@revoke.command("key")
@click.argument("key_id", metavar="ID")
@control_option
def revoke_key(key_id: str, control: str) -> None:
    """Take a key back, by its id. Gateways that have just seen it take it for 5 s more."""
    revoked = ask_control(control, lambda stub: stub.RevokeKey(control_pb2.RevokeKeyRequest(id=key_id)))
    click.echo(f"{revoked.info.id} revoked")


@click.group("delete")
def delete() -> None:
    """Delete tenants."""


@delete.command("tenant")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@control_option
def delete_tenant(name: str, yes: bool, control: str) -> None:
    """Delete a tenant and revoke its keys."""
    if not yes:
        click.confirm(f"Delete {name} and revoke its keys?", abort=True, err=True)
    deleted = ask_control(control, lambda stub: stub.DeleteTenant(control_pb2.DeleteTenantRequest(name=name)))
    click.echo(f"{name} deleted, {deleted.num_revoked_keys} keys revoked")


@click.command("tenants")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, metavar="N", help="At most so many.")
@watch_option
@control_option
@output_option("table", "wide", "json", "yaml", "name")
def get_tenants(names: tuple[str, ...], limit: int, watch: bool, control: str, output: str) -> None:
    """List tenants by name. With NAMEs only those; exit code 3 if one of them does not exist."""

    async def listed(stub: Control) -> tuple[list[tenants_pb2.Tenant], int]:
        if names:
            calls = [stub.GetTenant(control_pb2.GetTenantRequest(name=name)) for name in names]
            return [answer.tenant for answer in await asyncio.gather(*calls)], len(names)
        found: list[tenants_pb2.Tenant] = []
        token = ""
        while True:
            request = control_pb2.ListTenantsRequest(page_size=min(1000, limit - len(found)), page_token=token)
            page = await stub.ListTenants(request)
            found += page.tenants
            token = page.next_page_token
            if not token or len(found) >= limit:
                return found, page.num_tenants

    def read() -> list[dict[str, Any]]:
        found, total = ask_control(control, listed)
        if total > len(found):
            note(f"{len(found)} of {total} tenants (--limit)")
        return [tenant_row(tenant) for tenant in found]

    shown = ("name", "weight", "models", *_QUOTAS)
    show_rows("tenants", read, (*shown, "version") if output == "wide" else shown, output, watch=watch)


@click.command("keys")
@click.option("--tenant", default="", metavar="NAME", help="Only its keys.")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, metavar="N", help="At most so many.")
@watch_option
@control_option
@output_option("table", "json", "yaml", "name")
def get_keys(tenant: str, limit: int, watch: bool, control: str, output: str) -> None:
    """List API keys by tenant: their ids, what they open, and until when. Never the keys."""

    def read() -> list[dict[str, Any]]:
        return [key_row(key) for key in ask_control(control, lambda stub: all_keys(stub, tenant, limit))]

    show_rows("keys", read, KEY_COLUMNS, output, watch=watch)


async def all_keys(stub: Control, tenant: str = "", limit: int = 1_000_000) -> list[tenants_pb2.ApiKey]:
    """Of one tenant or of all, page by page."""
    found: list[tenants_pb2.ApiKey] = []
    token = ""
    while True:
        size = min(1000, limit - len(found))
        request = control_pb2.ListKeysRequest(tenant=tenant, page_size=size, page_token=token)
        page = await stub.ListKeys(request)
        found += page.keys
        token = page.next_page_token
        if not token or len(found) >= limit:
            return found


def tenant_row(tenant: tenants_pb2.Tenant) -> dict[str, Any]:
    quota = tenant.quota
    return {
        "name": tenant.name,
        "weight": round(tenant.weight, 4) or 1.0,
        "models": list(tenant.models),
        **{name: getattr(quota, name) if quota.HasField(name) else None for name in _QUOTAS},  # type: ignore[arg-type]
        "version": tenant.version,
    }


def key_row(key: tenants_pb2.ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": [_SCOPE_NAMES.get(scope, str(scope)) for scope in key.scopes],
        "created": moment(key.created_unix_s),
        "expires": moment(key.not_after_unix_s),
        "valid": not key.not_after_unix_s or time.time() < key.not_after_unix_s,
    }
