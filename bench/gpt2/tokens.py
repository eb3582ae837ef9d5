"""GPT-2's tokenizer: byte pairs that are merged, in the order in which training found them.

Text is cut into words, each with the space before it. A word's UTF-8 bytes, each written as a letter of its own, are
merged pair by pair, the pair that training found first before all others, until none is left that it found. So any text
has tokens, and tokens are bytes: a character may need several.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2; files as in Hugging
Face's transformers. They need no library: it would be a dependency in place of this page.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from flashcli.errors import BadInput, explained

HINT = "huggingface.co/openai-community/gpt2 has these files."
END = "<|endoftext|>"
PROMPT = "Hello, I'm a language model,"
# Endings as in "I'm"; letters, digits or other characters, with a space before them; white space, but for a space that
# is the next word's.
WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+", re.ASCII)


def _letters() -> list[str]:
    """The letter of each byte: itself where Latin-1 prints it, else one from U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


LETTERS = _letters()
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


class Tokenizer:
    """Text to tokens and back, by the number of each token and the merges in their order."""

    def __init__(self, numbers: Mapping[str, int], merges: Iterable[tuple[str, str]]) -> None:
        self._numbers, self._ranks = numbers, {pair: rank for rank, pair in enumerate(merges)}
        self._names = {number: name for name, number in numbers.items()}
        self._tokens_of = functools.cache(self._merged)
        self.end = numbers.get(END)  # the token that ends a text
        self.size = max(self._names, default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, in which `END` is a word like any other."""
        return [number for word in words(text) for number in self._tokens_of(word)]

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none of one that the vocabulary lacks."""
        return bytes(BYTES[letter] for letter in self._names.get(token, ""))

    def _merged(self, word: str) -> list[int]:
        parts = [LETTERS[byte] for byte in word.encode(errors="surrogateescape")]
        while (first := min(itertools.pairwise(parts), key=self._rank, default=None)) in self._ranks:
            parts = _joined(parts, first)
        try:
            return [self._numbers[part] for part in parts]
        except KeyError as error:
            raise BadInput(f"the vocabulary has no token {error}.", "take the files of one model.") from None

    def _rank(self, pair: tuple[str, str]) -> float:
        return self._ranks.get(pair, float("inf"))


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """The parts with each occurrence of the pair, from the left, made one."""
    found: list[str] = []
    for part in parts:
        if found and (found[-1], part) == pair:
            found[-1] += part
        else:
            found.append(part)
    return found


def words(text: str) -> list[str]:
    """The words of a text, which are merged each for itself; together they are the text."""
    shadow = "".join(_ascii_like(character) for character in text)
    return [text[found.start() : found.end()] for found in WORDS.finditer(shadow)]


def _ascii_like(character: str) -> str:
    """An ASCII character of the same kind: a letter, a digit, white space or another one."""
    if character.isascii():
        return character
    kind = unicodedata.category(character)[0]
    return {"L": "a", "N": "0"}.get(kind, "\t" if character.isspace() else ".")


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder: vocab.json and merges.txt, or tokenizer.json. BadInput where there is neither."""
    whole = folder / "tokenizer.json"
    if not (folder / "vocab.json").exists() and not whole.exists():
        told = f"{str(folder)!r} has no tokenizer: neither vocab.json with merges.txt, nor tokenizer.json."
        raise BadInput(told, HINT)
    try:
        if (folder / "vocab.json").exists():
            numbers = json.loads(_read(folder / "vocab.json"))
            lines = _read(folder / "merges.txt").splitlines()
            merges = [line.split() for line in lines if line and not line.startswith("#version")]
        else:
            model = json.loads(_read(whole))["model"]
            numbers, merges = model["vocab"], [x.split() if isinstance(x, str) else x for x in model["merges"]]
        return Tokenizer({str(name): int(number) for name, number in numbers.items()}, [(a, b) for a, b in merges])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{str(folder)!r} has no tokenizer of GPT-2's kind.", HINT) from error


def _read(path: Path) -> str:
    with explained("read", path):
        return path.read_text(encoding="utf-8")


def of_bytes() -> Tokenizer:
    """A tokenizer that merges nothing: each byte is a token, and the last is `END`."""
    return Tokenizer({name: number for number, name in enumerate([*LETTERS, END])}, [])
