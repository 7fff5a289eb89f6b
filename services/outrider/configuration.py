"""Configuration of every process: one frozen dataclass, filled from a YAML file, the environment and flags.

Each field of the class, and of classes nested in it, is one option with one name everywhere: `drain_timeout` in the
file, OUTRIDER_DRAIN_TIMEOUT in the environment, --drain-timeout on the command line. The command line overrides the
environment, which overrides the file. A field's type defines how a value is parsed; the classes check ranges
themselves. Knows no process.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import os
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from outrider.masking import MASK, holds_password, masked

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

_MAX_FILE_BYTES = 1 << 20
_MAX_DEPTH = 32
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class ConfigError(ValueError):
    """An invalid configuration. The message names the option and where it was given."""


@dataclass(frozen=True, slots=True)
class Option:
    """In a field's Annotated type: properties of the option beyond name and type."""

    name: str = ""
    """Name of the option. Empty: the field's name without the `_s` of seconds."""
    read: Callable[[str], Any] | None = None
    """Makes the value from text. Raises ValueError, or OSError for a file."""
    secret: bool = False
    """Never shown."""
    required: bool = False
    """Must be configured, though code may leave it out."""


@dataclass(frozen=True, slots=True)
class Nested:
    """In the Annotated type of a field that is a dataclass: how its options are named."""

    prefix: str = ""
    without: tuple[str, ...] = ()


NO_OPTION = object()
"""In the Annotated type of a field that only code sets."""


@dataclass(frozen=True, slots=True)
class ConfigOption:
    name: str
    path: tuple[str, ...]
    """Names of the nested fields from the class to the option."""
    kind: Any
    """Its type, without None."""
    option: Option
    default: Any
    """MISSING if it must be given."""
    doc: Callable[[], str]

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"OUTRIDER_{self.name.upper()}"

    @property
    def repeated(self) -> bool:
        """Whether its flag may be given several times."""
        return self.option.read is None and get_origin(self.kind) is tuple


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written in its source."""

    value: Any
    where: str
    """The file, the variable or the flag."""


def load(
    cls: type[C],
    prog: str,
    description: str,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> C:
    """The configuration of a process. If it is invalid, ends the process with code 2 and one line on stderr.

    With --check-config a valid one ends the process too: with code 0, after printing the options in effect.
    """
    parser = make_parser(cls, prog, description)
    options = vars(parser.parse_args(arguments))
    check, file = options.pop("check_config"), options.pop("config")
    environment = os.environ if environment is None else environment
    try:
        given = _from_file(cls, file or environment.get("OUTRIDER_CONFIG", ""))
        given |= _from_environment(cls, environment)
        given |= _from_flags(cls, options)
        config = build(cls, given)
    except ConfigError as error:
        parser.error(str(error))
    if check:
        print(json.dumps(masked(shown(config)), indent=2))
        parser.exit(0)
    return config


def build(cls: type[C], given: Mapping[str, Given]) -> C:
    """The configuration with the `given` options, by name, and defaults for the others. Raises ConfigError."""
    values: dict[tuple[str, ...], Any] = {}
    for setting in settings(cls):
        if setting.name in given:
            values[setting.path] = _converted(setting, given[setting.name])
        elif setting.default is MISSING:
            raise ConfigError(f"{setting.name}: is needed: {setting.flag}, {setting.variable}, or a line in the file")
    try:
        defaults = {member.name: _default(member) for member in dataclasses.fields(cls)}
        made: C = _made(cls, defaults.__getitem__, values)
        return made
    except ValueError as error:
        raise ConfigError(f"{error}{_where_given(cls, given, str(error))}") from None


def shown(config: Any) -> dict[str, Any]:
    """Every option in effect, by its name. Secrets are masked; URLs are not yet."""
    return {setting.name: _shown(config, setting) for setting in settings(type(config))}


def _shown(config: Any, setting: ConfigOption) -> Any:
    value = reduce(getattr, setting.path, config)
    return (MASK if value else None) if setting.option.secret else value


def settings(cls: Any) -> tuple[ConfigOption, ...]:
    """All options of a configuration. One name may stand for several fields, which are then set together."""
    return _flattened(cls)


@cache
def _flattened(cls: Any) -> tuple[ConfigOption, ...]:
    return tuple(_settings(cls, Nested(), None, ()))


def _settings(cls: Any, nested: Nested, instance: Any, path: tuple[str, ...]) -> Iterator[ConfigOption]:
    hints = get_type_hints(cls, include_extras=True)
    for member in dataclasses.fields(cls):
        kind, marks = _unpacked(hints[member.name])
        if member.name in nested.without or NO_OPTION in marks:
            continue
        default = getattr(instance, member.name) if instance is not None else _default(member)
        option = next((mark for mark in marks if isinstance(mark, Option)), None)
        if dataclasses.is_dataclass(kind) and option is None:
            below = next((mark for mark in marks if isinstance(mark, Nested)), Nested())
            below = dataclasses.replace(below, prefix=nested.prefix + below.prefix)
            yield from _settings(kind, below, None if default is MISSING else default, (*path, member.name))
            continue
        option = option or Option()
        if option.required:
            default = MISSING
        name = nested.prefix + (option.name or member.name.removesuffix("_s"))
        doc = _Doc(cls, member.name)
        yield ConfigOption(name, (*path, member.name), kind, option, default, doc)


def _default(member: dataclasses.Field[Any]) -> Any:
    return member.default_factory() if member.default_factory is not MISSING else member.default


def _unpacked(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without None, and its annotations."""
    marks: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        marks = tuple(rest)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(one for one in get_args(hint) if one is not types.NoneType)
    return hint, marks


def _made(make: Callable[..., Any], default_of: Callable[[str], Any], values: Mapping[tuple[str, ...], Any]) -> Any:
    """Calls `make` with the values at these paths. For nested ones it starts from the defaults in `default_of`."""
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in {path[0] for path in values if len(path) > 1}:
        default = default_of(name)
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        own[name] = _made(partial(dataclasses.replace, default), partial(getattr, default), below)
    return make(**own)


def _where_given(cls: type[Any], given: Mapping[str, Given], message: str) -> str:
    """The source of the option that a class rejects: its messages begin with the name of the field."""
    field = message.partition(":")[0]
    names = {field.replace(".", "_"), field.rpartition(".")[2]}
    for setting in settings(cls):
        if setting.name in given and not names.isdisjoint((setting.name, setting.path[-1])):
            return f" ({given[setting.name].where})"
    return ""


# Values


def _converted(setting: ConfigOption, given: Given) -> Any:
    try:
        return _value(setting, given.value)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{setting.name}: {error} ({given.where})") from None


def _value(setting: ConfigOption, value: Any) -> Any:
    if setting.option.secret and value is None:
        # As --check-config prints it where there is none.
        return setting.default
    if setting.option.read is not None:
        return setting.option.read(",".join(map(str, value)) if isinstance(value, list) else _text(value))
    if get_origin(setting.kind) is tuple:
        kind = get_args(setting.kind)[0]
        return tuple(_plain(kind, one) for one in _listed(value))
    if setting.default is None and value in (None, ""):
        return None
    return _plain(setting.kind, value)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [one for part in value for one in _listed(part)] if isinstance(value, list) else [value]


def _plain(kind: Any, value: Any) -> Any:
    """One value of a simple type. Raises ValueError."""
    if kind is bool:
        found = value if isinstance(value, bool) else _WORDS.get(str(value).lower())
        return found if found is not None else _refuse(value, "true or false")
    if kind in (int, float):
        return _number(kind, value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = [one.value for one in kind]
        return kind(value) if value in known else _refuse(value, f"one of {', '.join(known)}")
    text = _text(value)
    return Path(text) if kind is Path else text


def _number(kind: type, value: Any) -> Any:
    what, readable = ("a whole number", str | int) if kind is int else ("a number", str | int | float)
    if isinstance(value, bool) or not isinstance(value, readable):
        _refuse(value, what)
    try:
        return kind(value)
    except ValueError:
        _refuse(value, what)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Path):
        _refuse(value, "text")
    return str(value)


def _refuse(value: Any, wanted: str) -> NoReturn:
    raise ValueError(f"{str(value)[:80]!r} is not {wanted}")


# Sources


def _from_flags(cls: type[Any], options: Mapping[str, Any]) -> dict[str, Given]:
    """Raises ConfigError for a password: every user of the machine can read a command line."""
    given = {s.name: Given(options[s.name], s.flag) for s in settings(cls) if s.name in options}
    for setting in settings(cls):
        value = given[setting.name].value if setting.name in given else ""
        if any(holds_password(one) for one in (value if isinstance(value, list) else [str(value)])):
            other = f"{setting.variable}, or a line in the file of --config"
            raise ConfigError(f"{setting.name}: others can read a password in {setting.flag}: give it in {other}")
    return given


def _from_environment(cls: type[Any], environment: Mapping[str, str]) -> dict[str, Given]:
    return {s.name: Given(environment[s.variable], s.variable) for s in settings(cls) if s.variable in environment}


def _from_file(cls: type[Any], file: str) -> dict[str, Given]:
    """Raises ConfigError that names the file, and the line or the option."""
    if not file:
        return {}
    given = read_mapping(file)
    known = {setting.name for setting in settings(cls)}
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(f"{name}: is not an option{f'; {near[0]} is one' if near else ''} ({file})")
    return {name: Given(value, file) for name, value in given.items()}


def read_mapping(file: str | Path, max_bytes: int = _MAX_FILE_BYTES) -> dict[str, Any]:
    """A YAML file that holds one mapping. Raises ConfigError that names the file, and the line where there is one."""
    # Imported here: most processes have no file.
    import yaml

    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise ConfigError(f"{file}: at most {max_bytes} bytes")
        kind = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        _check_depth(file, yaml.parse(text, kind))
        loader = kind(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{file}: has to be a mapping, names with values, as in `drain_timeout: 30`")
        _check_names(file, node)
        loaded: dict[str, Any] = loader.construct_document(node)
        return loaded
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{file}: {where}not valid YAML: {getattr(error, 'problem', None) or error}") from None


def _check_depth(file: str | Path, events: Iterable[Any]) -> None:
    """Bounds the nesting of the parser's events: the C loader recurses, and crashes the process when the stack is
    full."""
    import yaml

    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{file}: nested too deeply")


def _check_names(file: str | Path, root: Any) -> None:
    """Rejects repeated names in every mapping. YAML itself would take the last one."""
    nodes, looked_at = [root], set()
    while nodes:
        node = nodes.pop()
        # An alias is the same node object as its anchor.
        if id(node) in looked_at or not isinstance(node.value, list):
            continue
        looked_at.add(id(node))
        if node.id == "sequence":
            nodes += node.value
            continue
        names = set()
        for key, value in node.value:
            if not isinstance(key.value, str) or key.value in names:
                line = key.start_mark.line + 1
                raise ConfigError(f"{file}: line {line}: {key.value}: is repeated, or is not a name")
            names.add(key.value)
            nodes.append(value)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without a usage of fifty options. Builds the help only when it is requested."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def format_help(self) -> str:
        for action in self._actions:
            if isinstance(action.const, ConfigOption):
                action.help = _help(action.const).replace("%", "%%")
        return super().format_help()


def make_parser(cls: type[Any], prog: str, description: str) -> argparse.ArgumentParser:
    """The parser's namespace holds only the given options, by name and as text, and `config` and `check_config`."""
    parser = _Parser(
        prog=prog,
        description=f"{description} Any --option may stand in a file, as `option: value` with underscores, or in the"
        " environment, as OUTRIDER_OPTION. This command line goes before the environment, and that before the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="", metavar="FILE", help="YAML with options; OUTRIDER_CONFIG names it too")
    parser.add_argument("--check-config", action="store_true", help="only check all options, and print those in effect")
    added = set()
    for setting in settings(cls):
        if setting.name not in added:
            added.add(setting.name)
            _add(parser, setting)
    return parser


def _add(parser: argparse.ArgumentParser, setting: ConfigOption) -> None:
    more: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    if setting.kind is bool:
        action = parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **more)
    else:
        how = "append" if setting.repeated else "store"
        action = parser.add_argument(setting.flag, action=how, metavar=_metavar(setting), **more)
    # A place for the setting: these actions do not use `const`.
    action.const = setting


def _metavar(setting: ConfigOption) -> str:
    if setting.path[-1].endswith("_s"):
        return "S"
    names = {int: "N", float: "X", Path: "PATH"}
    return names.get(setting.kind, "TEXT")


def _help(setting: ConfigOption) -> str:
    default = default_text(setting)
    ends = "Required." if setting.default is MISSING else f"Default: {default}." if default else ""
    return f"{setting.doc()} {ends}".strip()


def default_text(setting: ConfigOption) -> str:
    """The default as one would write it; empty for none."""
    value = None if setting.default is MISSING else masked(setting.default)
    if setting.option.secret or value is None or value == "" or value == [] or value == {}:
        return ""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class _Doc:
    """The first paragraph below a field in the source of its class. Reads the source when called."""

    cls: Any
    name: str

    def __call__(self) -> str:
        for cls in self.cls.__mro__:
            if text := _docs(cls).get(self.name):
                return text
        return ""


@cache
def _docs(cls: Any) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        # Without the source there is no help; all else works.
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        match before, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.partition("\n\n")[0].split())
            case _:
                pass
    return found
