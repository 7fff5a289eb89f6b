"""An answer as a row of items, of which only the last one grows: reasoning, text and calls. For the APIs that number
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from outrider.gateway.generation.message_reader import MessageReader
from outrider.gateway.tools.parsers.tool_calls import Delta

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Item:
    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    """Of the function that is called."""
    text: str = ""
    """For a call, its arguments."""


@dataclass(frozen=True, slots=True)
class ItemStep:
    """What happens to an item: it begins, gets more text, or ends."""

    kind: Literal["begin", "grow", "end"]
    item: Item
    text: str = ""


@dataclass(slots=True)
class Items:
    items: list[Item] = field(default_factory=list)

    def add(self, delta: Delta, reader: MessageReader) -> Iterator[ItemStep]:
        if delta.reasoning:
            yield from self._grow("reasoning", delta.reasoning)
        written = 0
        for each in delta.calls:
            yield from self._text(delta.content[written : each.at])
            written = each.at
            yield from self._grow("call", each.arguments, reader.call(each).get("id", ""), each.name)
        yield from self._text(delta.content[written:])

    def end(self) -> Iterator[ItemStep]:
        """Ends the last item, which may be incomplete."""
        if self.items:
            yield ItemStep("end", self.items[-1])

    def _text(self, text: str) -> Iterator[ItemStep]:
        if text:
            yield from self._grow("text", text)

    def _grow(self, kind: Kind, text: str, call_id: str = "", name: str = "") -> Iterator[ItemStep]:
        if call_id or not self.items or self.items[-1].kind != kind:
            yield from self.end()
            self.items.append(Item(kind, len(self.items), call_id, name))
            yield ItemStep("begin", self.items[-1])
        item = self.items[-1]
        item.text += text
        if text:
            yield ItemStep("grow", item, text)
