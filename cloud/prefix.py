"""Going on right behind a text that the caller has already.

Tokenizers put the space of a new word into the word's own token, so a model that is given "The capital of "
with its last space says " France" next, and two spaces stand where one belongs. The spaces at the end of a
prefix are therefore kept from the model, and taken off the beginning of what it says.

Pure. The caller's text stays as it is: prefix and continuation joined read as one text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PrefixJoin:
    """Joins one continuation to its prefix. `shown_to_model` is the prefix that the model is given."""

    shown_to_model: str
    _held: str

    @classmethod
    def of(cls, prefix: str) -> PrefixJoin:
        shown = prefix.rstrip(" ")
        return cls(shown, prefix[len(shown) :])

    def take(self, text: str) -> str:
        """The next piece of the continuation, less the spaces that the prefix ends with already."""
        if not self._held or not text:
            return text
        spaces = len(text) - len(text.lstrip(" "))
        repeated = min(spaces, len(self._held))
        # Once something else comes, the seam is behind us; until then it may go on in the next piece.
        self._held = self._held[repeated:] if repeated == len(text) else ""
        return text[repeated:]
