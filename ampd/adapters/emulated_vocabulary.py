"""The vocabulary of the emulated model: what its token ids are, and their text.

Ids below 256 are the bytes of UTF-8, so that any text becomes tokens; the control codes 1 and 2
are special: the start and the end of a turn, the end being what a real model stops with. Ids
from 256 on are words: what the emulated engine says. Each has its own five letters (Wilkerson's
proquints: 16 bits as consonant, vowel, consonant, vowel, consonant), so a text tells its tokens.
None of it is language.
"""

from __future__ import annotations

from typing import Final

VOCAB_SIZE: Final = 1 << 16
"""Token ids are below it."""
FIRST_WORD_TOKEN_ID: Final = 256
"""Ids from here on are words; those below are bytes."""
TURN_TOKEN_ID: Final = 1
"""Opens a turn of a chat, before its role."""
EOS_TOKEN_ID: Final = 2
"""Ends a turn: the stop token."""
SPECIAL_TOKEN_IDS: Final = frozenset((TURN_TOKEN_ID, EOS_TOKEN_ID))

_ASCII: Final = 128
_CONSONANTS: Final = "bdfghjklmnprstvz"
_VOWELS: Final = "aiou"


def detokenise(token_id: int, *, skip_special_tokens: bool = True) -> str:
    """The text of one token: a word has a space in front. A byte that is only a part of a
    character has none of its own, and reads as U+FFFD. IndexError for an id that is none."""
    if not 0 <= token_id < VOCAB_SIZE:
        raise IndexError(f"token ids are in 0..{VOCAB_SIZE - 1}, not {token_id}")
    if token_id >= FIRST_WORD_TOKEN_ID:
        return (
            f" {_CONSONANTS[token_id >> 12]}{_VOWELS[token_id >> 10 & 3]}"
            f"{_CONSONANTS[token_id >> 6 & 15]}{_VOWELS[token_id >> 4 & 3]}"
            f"{_CONSONANTS[token_id & 15]}"
        )
    if skip_special_tokens and token_id in SPECIAL_TOKEN_IDS:
        return ""
    return chr(token_id) if token_id < _ASCII else "\ufffd"
