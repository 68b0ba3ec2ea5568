"""One command of a scenario: a verb, words, and options `name=value`."""

from typing import TypeVar

V = TypeVar("V")
UNITS = (("ms", 0.001), ("min", 60.0), ("s", 1.0))


class NamedThings(dict[str, V]):
    """Things that a scenario names: hosts, requests, tables. Raises ValueError for an unknown name."""

    def __missing__(self, name: str) -> V:
        raise ValueError(f"there is no {name}")


class CommandLine:
    """The unread rest of a command. Whatever is left at the end was not understood."""

    def __init__(self, text: str) -> None:
        self.verb, *rest = text.split()
        self._words = [word for word in rest if "=" not in word]
        self._options = dict(word.split("=", 1) for word in rest if "=" in word)

    def word(self, default: str | None = None) -> str:
        """Returns the next word. Raises ValueError if there is none, and no default."""
        if self._words:
            return self._words.pop(0)
        if default is None:
            raise ValueError("a word is missing")
        return default

    def flag(self, name: str) -> bool:
        """Returns True if that word is there."""
        found = name in self._words
        if found:
            self._words.remove(name)
        return found

    def text(self, name: str, default: str = "") -> str:
        """Returns an option."""
        return self._options.pop(name, default)

    def number(self, name: str, default: int = 0) -> int:
        """Returns an option that is a number."""
        return int(self._options.pop(name, default))

    def seconds(self, name: str) -> float | None:
        """Returns an option that is a duration, in seconds, or None."""
        found = self._options.pop(name, None)
        return None if found is None else seconds(found)

    def options(self) -> dict[str, str]:
        """Returns all options that are left."""
        options, self._options = self._options, {}
        return options

    def check_used(self) -> None:
        """Raises ValueError if something is left."""
        left = [*self._words, *self._options]
        if left:
            raise ValueError(f"not understood: {' '.join(left)}")


def seconds(text: str) -> float:
    """Returns a duration such as 5s, 200ms or 2min, in seconds. Raises ValueError for any other text."""
    for unit, factor in UNITS:
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise ValueError(f"{text} is no duration")


def pair(text: str) -> tuple[int, int]:
    """Returns two numbers `a-b`: the range from a to b, without b."""
    first, _, end = text.partition("-")
    return int(first), int(end)
