"""The documents name only what is there: files, commands, headings. What they say of it is for readers to check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
from outrider.draft.config import parse_arguments as parse_draft
from outrider.gateway.config import parse_arguments as parse_gateway
from outrider.metadata.events import EventKind
from outrider.target.config import parse_arguments as parse_target
from outrider_controller.cli.app import cli
from outrider_controller.config import parse_arguments as parse_controller
from outrider_controller.control.alerts.active import AlertKind
from outrider_controller.control.config import parse_arguments as parse_control
from outrider_controller.router.config import parse_arguments as parse_router

from benchmarks.__main__ import benchmarks
from docs import cli_page
from loadtest.__main__ import loadtest
from tests.soak.__main__ import soak

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTS = sorted([*_ROOT.glob("*.md"), *_ROOT.glob("docs/*.md"), *_ROOT.glob("docs/decisions/*.md")])
_DECISIONS = [path for path in _DOCUMENTS if path.parent.name == "decisions"]
# Decisions and the changelog name commands of their time.
_CURRENT = [path for path in _DOCUMENTS if path.parent.name != "decisions" and path.name != "CHANGELOG.md"]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_GROUPS: dict[str, click.Command] = {
    "outrider": cli,
    "python -m benchmarks": benchmarks,
    "python -m loadtest": loadtest,
}
_GROUPS |= {"python -m tests.soak": soak}
# A path in the repository: it has a folder, and ends in a folder's slash or in a suffix.
_PATH = re.compile(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|c|h|proto|md|toml|json|svg))?)`")
_SOURCE_ROOTS = ("", "tests", "services", "services/outrider", "controller", "controller/outrider_controller")


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


@pytest.mark.parametrize("document", _DOCUMENTS, ids=_name)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for link in _LINK.findall(text):
        if "://" in link:
            continue
        path, _, heading = unquote(link).partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{_name(document)}: {link}"
        assert not heading or heading in _headings(target), f"{_name(document)}: {link}"


def test_a_decision_that_no_longer_holds_links_to_the_one_in_its_place() -> None:
    status = {path.name: path.read_text().split("**Status:**")[1].split("\n\n")[0] for path in _DECISIONS}
    for name, said in status.items():
        assert "replaced by" not in said and "taken out" not in said, f"{name}: say superseded by, with a link"
        assert "superseded" not in said or re.search(r"superseded by \[\d{4}\]\(\d{4}-[a-z-]+\.md\)", said), name


def test_each_decision_has_a_number_of_its_own() -> None:
    numbers = [path.name[:4] for path in _DECISIONS]
    assert all(number.isdigit() for number in numbers) and len(set(numbers)) == len(numbers), numbers


def _headings(document: Path) -> set[str]:
    """As anchors, the way that GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("document", _CURRENT, ids=_name)
def test_every_command_that_a_document_names_exists(document: Path) -> None:
    for command in _CODE.findall(document.read_text()):
        for start, group in _GROUPS.items():
            for words in re.findall(rf"(?:^|[\s`(]){re.escape(start)} ([a-z][a-z \-]*)", command):
                assert _resolves(group, words.split()), f"{_name(document)}: {start} {words}"


def _resolves(group: click.Command, words: list[str]) -> bool:
    """Whether the words begin with the names of a command and, where that is a group, of one of its own."""
    context = click.Context(group)
    while isinstance(group, click.Group) and words:
        found = group.get_command(context, words.pop(0))
        if found is None:
            return False
        group = found
    return True


@pytest.mark.parametrize("document", _CURRENT, ids=_name)
def test_every_module_that_a_document_runs_exists(document: Path) -> None:
    # vLLM has an environment of its own, in which tests/vllm runs what is documented.
    for module in re.findall(r"python -m (?!vllm\.)([a-z][\w.]*\w)", document.read_text()):
        assert find_spec(module) is not None, f"{_name(document)}: {module}"


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Commands with the options that code blocks give them, one line each."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for start in _GROUPS:
                if line.startswith(f"{start} "):
                    yield start, line.removeprefix(f"{start} ").partition("#")[0]


@pytest.mark.parametrize("document", _CURRENT, ids=_name)
def test_every_option_in_a_block_of_commands_exists(document: Path) -> None:
    for start, line in _options(document.read_text()):
        command: click.Command | None = _GROUPS[start]
        for word in line.split():
            if not isinstance(command, click.Group):
                break
            command = command.get_command(click.Context(command), word)
        assert command is not None, f"{_name(document)}: {start} {line}"
        if command.context_settings.get("ignore_unknown_options"):
            continue  # Handed on to a process, whose own parser knows them.
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", line):
            assert option in known, f"{_name(document)}: {start} {line}"


@pytest.mark.parametrize("document", _CURRENT, ids=_name)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    for path in _PATH.findall(document.read_text()):
        assert _found(path) is not None, path


def _found(path: str) -> Path | None:
    return next((found for root in _SOURCE_ROOTS if (found := _ROOT / root / path).exists()), None)


def test_every_word_that_the_glossary_explains_is_still_in_the_code() -> None:
    words = (_ROOT / "docs/glossary.md").read_text().partition("## Words of the code")[2]
    for line in filter(_PATH.search, words.splitlines()):
        word, path = line.split("`")[1], _found(_PATH.findall(line)[0])
        assert path is not None and word in path.read_text(), f"{word} is gone: take its line out"


def test_operations_names_every_kind_of_event() -> None:
    text = (_ROOT / "docs/operations.md").read_text()
    assert [kind for kind in EventKind if f"`{kind}`" not in text] == []


def test_the_page_of_commands_is_as_they_say() -> None:
    assert cli_page.PAGE.read_text() == cli_page.page(), "python docs/cli_page.py writes it"


def test_operations_names_every_alert() -> None:
    text = (_ROOT / "docs/operations.md").read_text()
    assert [kind for kind in AlertKind if f"| `{kind}` |" not in text] == []


def test_the_readme_is_short() -> None:
    assert len((_ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_measurement_of_the_past_says_what_where_and_how() -> None:
    lines = (_ROOT / "benchmarks/results/history.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        entry = json.loads(line)
        assert all(entry[field] for field in ("question", "date", "machine", "command", "figures")), line[:80]


@pytest.mark.parametrize(
    "parse", [parse_target, parse_draft, parse_gateway, parse_router, parse_control, parse_controller]
)
def test_every_flag_that_a_process_helps_with_is_on_the_page_of_options(
    parse: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    said = capsys.readouterr().out
    flags = {flag.removeprefix("no-") for flag in re.findall(r"^ +(?:-\w, )?--([a-z][a-z-]+)", said, re.MULTILINE)}
    listed = re.findall(r"`--([a-z-]+)`", (_ROOT / "docs/cli.md").read_text().partition("## outrider target")[2])
    assert len(flags) > 5
    assert flags - set(listed) <= {"help", "config", "check-config"}
