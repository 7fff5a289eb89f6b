"""The first words of the user's turn in the conversations that the target writes, by kind of task.

The target completes the turn itself, then answers it. Breadth matters more than any one line: a draft is only good on
text like its training data.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskKind:
    """One kind of conversation."""

    name: str
    weight: float
    openings: tuple[str, ...]
    user_tokens: tuple[int, int]
    """Fewest and most tokens the target may add to the user's turn."""
    endings: tuple[str, ...] = ("",)
    """Appended to a turn that was cut at its length limit."""


def _kind(name: str, weight: float, user_tokens: tuple[int, int], openings: str, endings: str = "") -> TaskKind:
    """Openings and endings are separated by bars; \\n in them is a line break."""
    return TaskKind(name, weight, _split(openings), user_tokens, _split(endings))


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.replace("\\n", "\n") for part in text.split("|"))


SHORT = (
    _kind("open", 3, (12, 90), ""),
    _kind(
        "question",
        3,
        (4, 40),
        "What|How|Why|Who|When|Where|Which|Is|Can|Do|What is|How do|Who was|When did|What kind of|How many|Where is|"
        "What are the|In what year|Who wrote|What does|Where did|Who is the|When was the",
    ),
    _kind(
        "write",
        2,
        (10, 80),
        "Write a|Write an|Write a short story about|Write an email|Draft a|Create a|Compose a|Craft|Describe|Imagine|"
        "Write a blog post about|Rewrite the following|Edit the following paragraph|Write a poem|"
        "Describe a|Please write",
    ),
    _kind(
        "role",
        1,
        (15, 90),
        "Pretend|Act as|You are a|Imagine you are|Take on the role of|Please assume the role of|As a",
    ),
    _kind(
        "math",
        3,
        (30, 100),
        "A train|Sarah has|If a|Tom|A store|Maria|There are|John bought|A farmer|Calculate|Find the|Solve|James|Each|"
        "A company|Lisa and|In a class of|A baker|Emma|Mike has|The price of|Twice|A bus|Anna wants to",
        " How many are left?| How much does it cost in total?| How many does she have?| What is the total?",
    ),
    _kind(
        "code",
        1.3,
        (12, 100),
        "Write a Python|Write a function|Implement|Explain the following code|Write a program|How do I|Write a C++|"
        "Fix the bug in this|Write a SQL|Write a JavaScript",
    ),
    _kind(
        "translate",
        2,
        (12, 60),
        "Translate the following sentence into English: Die|Translate from German to English: Der|"
        "Translate to English: Das|Translate this German sentence to English: Ich|Translate into English: Wir|"
        "Translate German to English: In|Translate German to English: Die|Translate German to English: Ein|"
        "Translate German to English: Es|Translate: Der|Translate French to English: Le|"
        "Translate German to English: Im Jahr|Translate German to English: Nach|Translate Spanish to English: El|"
        "Translate German to English: Mit",
    ),
    _kind(
        "explain",
        2,
        (8, 60),
        "Explain|Discuss|Compare|Analyze|Give me|List|Provide|Describe the|Summarize the|Identify|Suggest|Outline|"
        "What are some|Tell me about|Help me",
    ),
    _kind(
        "extract",
        1,
        (30, 130),
        "Extract|Given the following|From the following text, extract|Classify the following|"
        "Identify the named entities in|Here is a list of|Evaluate the following|Given these|Read the following|"
        "Answer the question based on",
    ),
)

_LEADS = (
    "The|In|A|On|After|When|Police|During|Scientists|It was|By|One of|Two|For|As|Since|Last|She|He|They|With|Although|"
    "According to|A new|The city of|Born in|The first|At the|More than|The company|Researchers|An|President|From|Many|"
    "British|American|Following|This|Since the"
)


def _led(prefixes: str) -> str:
    return "|".join(prefix + lead for prefix in prefixes.split("|") for lead in _LEADS.split("|"))


LONG = (
    _kind(
        "summarize",
        3,
        (180, 640),
        _led(
            "Summarize: |Summarize the following article:\\n\\n|Please summarize this text: |"
            "Write a summary of the following news story.\\n\\n|Give a short summary: "
        ),
        "||\\n\\nSummary:",
    ),
    _kind(
        "documents",
        3,
        (180, 640),
        _led(
            "|Context: |Passage: |Read the passage and answer the question.\\n\\n|"
            "Use the following documents to answer.\\n\\n|Document 1: |Title: "
        ),
        "\\nWhat is the|\\nWho was the|\\nWhen did the|\\nWhere is the|\\nWho|\\nHow many|\\nWhat|\\nWhy did|"
        "\\nWhere did|\\nWho plays|\\nWhat year was",
    ),
    _kind(
        "edit",
        1,
        (80, 300),
        "Edit the following paragraph:\\n|Proofread this text:\\n|Rewrite this in simpler words:\\n|"
        "Turn the following into bullet points:\\n",
    ),
    _kind(
        "long code",
        0.7,
        (100, 350),
        "Here is a Python function.\\n\\n```python\\ndef|Review this code:\\n\\n```\\n|```python\\nimport|"
        "Explain what this does:\\n\\n```",
    ),
)


def choose(kinds: tuple[TaskKind, ...], rng: random.Random) -> TaskKind:
    return rng.choices(kinds, [kind.weight for kind in kinds])[0]
