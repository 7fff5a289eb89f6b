"""How a process is configured: file, environment and command line, and what --check-config says of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_origin

import pytest
import yaml
from outrider import configuration
from outrider.configuration import (
    NO_OPTION,
    ConfigError,
    ConfigOption,
    Nested,
    Option,
    load,
    read_mapping,
    settings,
    shown,
)
from outrider.draft.config import DraftConfig
from outrider.draft.config import parse_arguments as parse_draft
from outrider.gateway.config import GatewayConfig
from outrider.gateway.config import parse_arguments as parse_gateway
from outrider.masking import holds_password, masked
from outrider.target.config import TargetConfig
from outrider.target.config import parse_arguments as parse_target
from outrider_controller.config import ControllerConfig
from outrider_controller.config import parse_arguments as parse_controller
from outrider_controller.control.config import ControlConfig
from outrider_controller.control.config import parse_arguments as parse_control
from outrider_controller.router.config import RouterConfig
from outrider_controller.router.config import parse_arguments as parse_router

Parse = Callable[[list[str]], Any]
PROCESSES: dict[type[Any], Parse] = {
    TargetConfig: parse_target,
    DraftConfig: parse_draft,
    GatewayConfig: parse_gateway,
    RouterConfig: parse_router,
    ControlConfig: parse_control,
    ControllerConfig: parse_controller,
}


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    size: int = 3
    """How big."""
    colour: Colour = Colour.RED
    """Which."""


@dataclass(frozen=True, slots=True)
class Config:
    name: str
    """What it is called."""
    wait_s: float = 1.5
    """Seconds."""
    most: int | None = None
    """At most."""
    loud: bool = False
    """Whether."""
    peers: tuple[str, ...] = ()
    """Who."""
    path: Path | None = None
    """Where."""
    key: Annotated[bytes, Option("key_file", read=read_bytes, secret=True)] = b""
    """A file."""
    inner: Annotated[Inner, Nested("inner_")] = field(default_factory=lambda: Inner(size=4))
    fixed: Annotated[int, NO_OPTION] = 1

    def __post_init__(self) -> None:
        if self.wait_s < 0:
            raise ValueError(f"wait_s: must not be negative, got {self.wait_s:g}")


def read(*arguments: str, **environment: str) -> Config:
    return load(Config, "thing", "A thing.", ["--name", "n", *arguments], environment)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "thing.yaml"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, **environment: str) -> str:
    """The one line that says what is wrong."""
    with pytest.raises(SystemExit) as ended:
        load(Config, "thing", "A thing.", [*arguments], environment)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err.strip()


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    file.write_text("wait: 2\nmost: 2\nloud: true\n")
    config = read("--config", str(file), "--wait", "4", OUTRIDER_WAIT="3", OUTRIDER_MOST="3")
    assert (config.wait_s, config.most, config.loud) == (4.0, 3, True)
    assert read(OUTRIDER_CONFIG=str(file)).wait_s == 2.0


def test_what_is_not_given_is_as_the_class_says_nested_ones_too() -> None:
    assert read("--inner-colour", "blue") == Config("n", inner=Inner(size=4, colour=Colour.BLUE))


def test_a_field_without_an_option_is_set_by_code_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("fixed: 2\n")
    assert "fixed: is not an option" in refusal(capsys, "--name", "n", "--config", str(file))
    assert "--fixed" in refusal(capsys, "--name", "n", "--fixed", "2")
    assert read(OUTRIDER_FIXED="2").fixed == 1 and "fixed" not in shown(read())


@pytest.mark.parametrize("written", ["peers: [a:1, b:2]\npath: /x\n", "peers: a:1,b:2\npath: /x\n"])
def test_lists_are_lists_in_a_file_and_joined_or_repeated_elsewhere(written: str, file: Path) -> None:
    file.write_text(written)
    flags = ("--peers", "a:1", "--peers", "b:2", "--path", "/x")
    expected = read("--config", str(file))
    assert (expected.peers, expected.path) == (("a:1", "b:2"), Path("/x"))
    assert expected == read(*flags) == read(OUTRIDER_PEERS="a:1, b:2", OUTRIDER_PATH="/x")


def test_a_secret_comes_from_a_file_and_is_not_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(b"hunter2")
    assert read("--key-file", str(file)).key == b"hunter2"
    with pytest.raises(SystemExit):
        read("--key-file", str(file), "--check-config")
    printed = capsys.readouterr().out
    assert json.loads(printed)["key_file"] == "***" and "hunter2" not in printed


@pytest.mark.parametrize("url", ["redis://u:hunter2@h:1/0", "https://h/x?token=hunter2", "redis://h?password=hunter2"])
def test_a_password_is_refused_where_others_can_read_it(
    url: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "OUTRIDER_NAME, or a line in the file of --config"
    assert refusal(capsys, "--name", url) == f"thing: name: others can read a password in --name: give it in {other}"
    file.write_text(f"name: {url}\n")
    assert load(Config, "thing", "", ["--config", str(file)], {}).name == url
    assert load(Config, "thing", "", [], {"OUTRIDER_NAME": url}).name == url


@pytest.mark.parametrize("url", ["redis://u@h:1?password_file=/run/secret", "127.0.0.1:1", "http://h:1/a:b@c"])
def test_what_holds_no_password_is_taken_from_a_flag(url: str) -> None:
    assert load(Config, "thing", "", ["--name", url], {}).name == url


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("waits: 3\n", "waits: is not an option; wait is one ({file})"),
        ("wait: soon\n", "wait: 'soon' is not a number ({file})"),
        ("wait: -1\n", "wait_s: must not be negative, got -1 ({file})"),
        ("loud: maybe\n", "loud: 'maybe' is not true or false ({file})"),
        ("most: 1.5\n", "most: '1.5' is not a whole number ({file})"),
        ("most: true\n", "most: 'True' is not a whole number ({file})"),
        ("name: [x]\n", "name: \"['x']\" is not text ({file})"),
        ("inner_colour: green\n", "inner_colour: 'green' is not one of red, blue ({file})"),
        ("wait: 1\nwait: 2\n", "{file}: line 2: wait: is repeated, or is not a name"),
        ("- wait\n", "{file}: has to be a mapping, names with values, as in `drain_timeout: 30`"),
        ("wait: [\n", "{file}: line 2: not valid YAML: "),
        ("wait: !!python/name:os.system\n", "{file}: line 1: not valid YAML: could not determine a constructor"),
        ("key_file: /nonexistent\n", "key_file: [Errno 2] No such file or directory: '/nonexistent' ({file})"),
    ],
)
def test_a_bad_line_of_a_file_is_named(
    content: str, complaint: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(content)
    given = () if content.startswith("name") else ("--name", "n")
    said = refusal(capsys, *given, "--config", str(file))
    assert said.startswith(f"thing: {complaint.format(file=file)}")


def test_a_bad_variable_or_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    named = ("--name", "n")
    assert refusal(capsys, *named, OUTRIDER_WAIT="x") == "thing: wait: 'x' is not a number (OUTRIDER_WAIT)"
    assert refusal(capsys, *named, "--wait", "-2") == "thing: wait_s: must not be negative, got -2 (--wait)"
    assert refusal(capsys, *named, "--config", "/nonexistent") == "thing: /nonexistent: No such file or directory"
    assert "--nam" in refusal(capsys, "--nam", "x")
    assert refusal(capsys) == "thing: name: is needed: --name, OUTRIDER_NAME, or a line in the file"


def test_what_others_put_into_the_environment_is_no_option() -> None:
    """Kubernetes and our own command line do."""
    taken = {"OUTRIDER_API_KEY", "OUTRIDER_CACHE", "OUTRIDER_CONFIG", "OUTRIDER_CONTEXT", "OUTRIDER_CONTROL"}
    taken |= {"OUTRIDER_CONTEXTS_FILE", "OUTRIDER_GATEWAY", "OUTRIDER_OPERATOR_TOKEN", "OUTRIDER_SPAWNED"}
    assert not taken & {setting.variable for cls in PROCESSES for setting in settings(cls)}


@pytest.mark.parametrize("cls", PROCESSES)
def test_every_option_is_explained_and_means_one_thing(cls: type[Any]) -> None:
    found: dict[str, ConfigOption] = {}
    for setting in settings(cls):
        assert setting.doc(), setting.path
        same = found.setdefault(setting.name, setting)
        assert (same.kind, same.default) == (setting.kind, setting.default), setting.path
    assert {"advertise", "log_format", "metadata", "drain_timeout"} - {"advertise"} <= set(found)


def test_help_tells_what_an_option_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_gateway(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--max-running N Most requests at once. Default: 1024." in said


# Random configurations

_TEXTS = {
    "dtype": ["float32", "bfloat16", "int3"],
    "execution": ["auto", "native", "fused", "bare"],
    "native_variant": ["auto", "avx2", "sse9"],
    "quantization": ["none", "int8", "int3"],
    "attention": ["auto", "sdpa", "flash"],
    "device": ["cpu", "cuda", "cuda:1"],
    "log_format": ["human", "json", "xml"],
    "cpu_cores": ["0", "0,2-3", "3-2"],
    "tls_dir": ["", "", "/nonexistent"],
    "public_tls_dir": ["", "", "/nonexistent"],
    "metadata": ["redis://h:1", "rediss://u:p@h:1/0", "http://h"],
}
_ADDRESSES = ["127.0.0.1:0", "10.0.0.7:7001", "[::1]:7001", "0.0.0.0:7001", "nowhere", "h:70000"]


def _value(dice: random.Random, setting: ConfigOption, secret: Path) -> Any:
    """As a file would hold it; most are possible ones."""
    if setting.option.secret:
        return dice.choice([str(secret), str(secret), "/nonexistent"])
    if setting.name in _TEXTS:
        return dice.choice([_TEXTS[setting.name][0], *_TEXTS[setting.name]])
    if get_origin(setting.kind) is tuple:
        return [dice.choice(_ADDRESSES[:3]) for _ in range(dice.randint(1, 3))]
    if setting.name == "insecure":
        return True
    if setting.kind is bool:
        return dice.choice([True, False, "maybe"] if dice.random() < 0.1 else [True, False])
    if setting.kind is int:
        return dice.choice([1, 2, 16, 64, 0, -1, 10**6] if dice.random() < 0.2 else [1, 2, 4])
    if setting.kind is float:
        return dice.choice([0.5, 1.0, 30, 0, -1, "nan", "inf"] if dice.random() < 0.2 else [0.5, 0.25])
    if "listen" in setting.name or "advertise" in setting.name:
        return dice.choice(_ADDRESSES if dice.random() < 0.2 else _ADDRESSES[1:3])
    return dice.choice(["name", "/models/m"])


def _words(value: Any) -> list[str]:
    """As a command line, or joined as the environment, would hold it."""
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in _list(value)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _written(dice: random.Random, cls: type[Any], folder: Path, environment: pytest.MonkeyPatch) -> list[str]:
    """A random configuration, spread over the three sources; the command line that remains."""
    secret, file, arguments, lines = folder / "secret", folder / "config.yaml", [], {}
    secret.write_bytes(b"s" * 40)
    chance = dice.choice([0.05, 0.1, 0.3])
    for setting in settings(cls):
        often = setting.default is configuration.MISSING or setting.name in ("insecure", "metadata")
        if dice.random() > (0.95 if often else chance):
            continue
        value, place = _value(dice, setting, secret), dice.randrange(3)
        if place == 0:
            lines[setting.name] = value
        elif place == 1:
            environment.setenv(setting.variable, ",".join(_words(value)))
        elif any(holds_password(word) for word in _words(value)):
            lines[setting.name] = value
        elif setting.kind is bool:
            arguments.append(setting.flag if value is True else f"--no-{setting.flag[2:]}")
        else:
            arguments += [f"{setting.flag}={word}" for word in _words(value)]
    file.write_text(yaml.safe_dump(lines))
    return ["--config", str(file), *arguments]


@pytest.mark.parametrize("cls", PROCESSES)
def test_checking_agrees_with_starting_on_random_configurations(
    cls: type[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    possible = 0
    for seed in range(100):
        with pytest.MonkeyPatch.context() as environment:
            arguments = _written(random.Random(seed), cls, tmp_path, environment)
            started, refused = _outcome(PROCESSES[cls], arguments, capsys)
            checked, said = _outcome(PROCESSES[cls], [*arguments, "--check-config"], capsys)
        assert checked is None, seed
        if started is None:
            assert said == refused and ": " in said, seed
            continue
        possible += 1
        assert json.loads(said) == json.loads(json.dumps(masked(shown(started)))), seed
        assert _again(PROCESSES[cls], cls, started, tmp_path / "again.yaml") == started, seed
    assert 10 <= possible <= 95


def _outcome(parse: Parse, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The configuration, if there is one, and what was printed."""
    try:
        return parse(arguments), ""
    except SystemExit as ended:
        said = capsys.readouterr()
        assert (ended.code, bool(said.out), bool(said.err)) in ((0, True, False), (2, False, True))
        return None, said.out or said.err


def _again(parse: Parse, cls: type[Any], config: Any, file: Path) -> Any:
    """What comes of all options in effect, written into one file."""
    lines = {name: json.loads(json.dumps(value, default=str)) for name, value in shown(config).items()}
    for setting in settings(cls):
        if setting.option.secret and lines[setting.name]:
            lines[setting.name] = str(file.parent / "secret")
    file.write_text(yaml.safe_dump(lines))
    return parse(["--config", str(file)])


def test_a_process_that_only_checks_needs_no_network(tmp_path: Path) -> None:
    file = tmp_path / "control.yaml"
    file.write_text("metadata: redis://user:hunter2@nowhere.invalid:1\nlisten: 127.0.0.1:7001\n")
    command = [sys.executable, "-m", "outrider_controller.control", "--check-config", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    effective = json.loads(done.stdout)
    assert (effective["metadata"], effective["listen"]) == ("redis://***@nowhere.invalid:1", "127.0.0.1:7001")


def test_a_file_is_read_up_to_a_bound(file: Path) -> None:
    file.write_text("")
    assert read_mapping(file) == {}
    file.write_text("#" * (2 << 20))
    with pytest.raises(ConfigError, match="at most 1048576 bytes"):
        read_mapping(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # From PyYAML 6.0.4 on the parser has a bound of its own, and may reach it first.
        ("a: " + "[" * 100_000, "thing.yaml: (nested too deeply|.*nesting depth)"),
        ("a:\n- {b: 1}\n- {b: 1, c: {d: 1, d: 2}}\n", "line 3: d: is repeated"),
    ],
)
def test_a_file_that_would_be_taken_amiss_is_refused(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_mapping(file)


def test_a_list_that_holds_itself_is_read(file: Path) -> None:
    file.write_text("a: &a [*a]\n")
    (inner,) = read_mapping(file)["a"]
    assert inner is inner[0]
