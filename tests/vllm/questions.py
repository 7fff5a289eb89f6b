"""Forty questions to a real model, as its chat template writes them."""

from __future__ import annotations

from outrider.engine import resolve

MODEL = "smollm2-135m-instruct"
QUESTIONS = [
    *("What is the capital of France?", "Explain photosynthesis.", "Write a haiku about the sea.", "List five fruits."),
    *("How do I boil an egg?", "Repeat three times: the cat sat on the mat.", "What is 12 times 12?"),
    *("Write a Python function that adds two numbers.", "Who wrote Hamlet?", "Translate 'good morning' to Spanish."),
    *("Name the planets in order.", "Why is the sky blue?", "Give me a recipe for pancakes.", "What does HTTP mean?"),
    *("Write a limerick about a dog.", "Count from one to twenty.", "Describe a rainy day.", "What is a prime?"),
    *("Say one two three one two three one two three.", "Tell me a story about a robot.", "What is a noun?"),
    *("How does a bicycle stay upright?", "Write a SQL query for all users.", "Who was Marie Curie?", "What is DNA?"),
    *("Name three rivers in Africa.", "How is bread made?", "Write a short letter to a friend.", "What is gravity?"),
    *("List the days of the week.", "Explain what a loop is.", "What do bees eat?", "Spell the word rhythm."),
    *("Give an example of irony.", "How far away is the moon?", "Write a JSON object for a book.", "What is jazz?"),
    *("Why do leaves fall?", "Name four musical instruments.", "What is the opposite of cold?"),
]


def chats() -> list[list[int]]:
    """Their token ids, up to the beginning of the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(resolve(MODEL)), local_files_only=True)
    asked = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in asked]
