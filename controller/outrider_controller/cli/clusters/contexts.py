"""What commands ask, by name: a stack that `outrider up` runs on this machine, or a cluster that the operator named."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click
import psutil
from outrider.user_cache import cache_directory, private_directory, write_whole

from outrider_controller.cli.clusters import named as clusters
from outrider_controller.cli.clusters.named import Context
from outrider_controller.cli.exits import CommandError, ExitCode
from outrider_controller.cli.output import note
from outrider_controller.private import locked

DEFAULT = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_WANTED, _CHOSEN = f"{__name__}.wanted", f"{__name__}.chosen"


def check_name(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """For an option that names a context; empty names none."""
    if value and not _NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not 1 to 63 of a-z, 0-9 and '-'")
    return value


@contextlib.contextmanager
def claimed(wanted: str) -> Iterator[str]:
    """A name for a stack of this process, until the block ends: `wanted`, or a free one if it is empty.

    Raises CommandError when a stack with that name runs, or a cluster has it.
    """
    name = _claim(wanted)
    try:
        yield name
    finally:
        _file(name).unlink(missing_ok=True)


def publish(name: str, endpoints: Mapping[str, str], operator_token_file: Path | None = None) -> None:
    """From here on commands find the stack of this process, and may operate it."""
    control, grpc, model, http = (endpoints.get(what, "") for what in ("control", "grpc", "model", "http"))
    _write(Context(name, control, grpc, model, http=http, token_file=str(operator_token_file or "")))


def operator_token(control: str = "") -> str:
    """What a command says to this control plane: OUTRIDER_OPERATOR_TOKEN, or what the context at this address has.
    Empty where there is none. Raises OSError when its file cannot be read, CommandError for what cannot be one."""
    if token := os.environ.get("OUTRIDER_OPERATOR_TOKEN"):
        return _sendable("OUTRIDER_OPERATOR_TOKEN", token)
    candidates = (meant(), *running())
    found = next((one for one in candidates if one and one.control == control), Context())
    return _secret(found.token_file)


def api_key(gateway: str) -> str:
    """For this gateway: OUTRIDER_API_KEY, or what the context at this address has. Raises OSError, CommandError."""
    if key := os.environ.get("OUTRIDER_API_KEY"):
        return _sendable("OUTRIDER_API_KEY", key)
    return _secret(cluster_at(gateway=gateway).api_key_file)


def _secret(file: str) -> str:
    return _sendable(file, Path(file).expanduser().read_text(errors="replace")) if file else ""


def _sendable(where: str, secret: str) -> str:
    """Without what stands around it. Raises CommandError for what no header can carry."""
    found = secret.strip()
    if not (found.isascii() and found.isprintable()):
        raise CommandError(f"{where}: a token is one line of printable ASCII", ExitCode.DENIED, reason="NO_CREDENTIAL")
    return found


def running() -> list[Context]:
    """Stacks that are up, the first started first."""
    found = [one for one in map(_read, _directory().glob("*.json")) if one is not None and any(one.endpoints.values())]
    return sorted(found, key=lambda context: (context.started_s, context.name))


def known() -> tuple[list[Context], str]:
    """Clusters and running stacks; and the name of the current one, empty where none was chosen."""
    named = clusters.read()
    return [*named.named.values(), *running()], named.current


def choose(name: str, contexts: Sequence[Context], current: str = "") -> Context | None:
    """The one of that name; without a name the current one, else the stack `default`, else the one that runs longest.

    None when nothing runs. Raises CommandError for a name that none has.
    """
    here = [context for context in contexts if context.pid]
    wanted = name or current or DEFAULT
    for context in contexts if name or current else here:
        if context.name == wanted:
            return context
    if name or wanted != DEFAULT:
        others = ", ".join(context.name for context in contexts) or "none"
        raise CommandError(f"no context is named {wanted} (there are: {others})", ExitCode.NOT_FOUND)
    return here[0] if here else None


def want(ctx: click.Context, name: str) -> None:
    ctx.meta[_WANTED] = name


def chosen(ctx: click.Context) -> Context | None:
    """Looked up once for a command. Says which it is where another could have been meant."""
    if _CHOSEN not in ctx.meta:
        contexts, current = known()
        found = ctx.meta[_CHOSEN] = choose(ctx.meta.get(_WANTED, ""), contexts, current)
        others = [context.name for context in contexts if context.pid and context != found]
        if found is not None and others:
            note(f"asking {found.name} at {found.gateway} (--context; also running here: {', '.join(others)})")
    result: Context | None = ctx.meta[_CHOSEN]
    return result


def meant() -> Context | None:
    """The context that the command under way asks, if it asks one."""
    ctx = click.get_current_context(silent=True)
    return chosen(ctx) if ctx is not None and (ctx.meta.get(_WANTED) or _CHOSEN in ctx.meta) else None


def cluster_at(**address: str) -> Context:
    """The cluster of `meant`, if it has this address: what one is trusted with goes to no other. Else an empty one."""
    context = meant()
    [(what, where)] = address.items()
    return context if context is not None and getattr(context, what) == where else Context()


def _claim(wanted: str) -> str:
    numbered = (f"{DEFAULT}-{number}" for number in itertools.count(2))
    taken = clusters.read().named
    with locked(private_directory(_directory())):
        for name in [wanted] if wanted else itertools.chain([DEFAULT], numbered):
            if name not in taken and _read(_file(name)) is None:
                _write(Context(name))
                return name
    what = "a cluster is named {} (outrider config)" if wanted in taken else "a stack named {} runs here already"
    raise CommandError(what.format(wanted), ExitCode.USAGE)


def _directory() -> Path:
    return cache_directory() / "contexts"


def _file(name: str) -> Path:
    return _directory() / f"{name}.json"


def _write(context: Context) -> None:
    me = psutil.Process()
    entry = replace(context, pid=me.pid, process_started_s=me.create_time(), started_s=time.time())
    write_whole(_file(context.name), json.dumps(asdict(entry)))


def _read(file: Path) -> Context | None:
    """None when its process no longer lives, or the file is none of ours."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        found = Context(**json.loads(file.read_text()))
        if abs(psutil.Process(found.pid).create_time() - found.process_started_s) < 1:
            return found
    return None
