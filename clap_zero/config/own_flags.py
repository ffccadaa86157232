"""The flags of a command that otherwise has those of `train`. Light: the doctor reads it before anything of weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clap_zero.errors import ConfigError


def take_own(argv: Sequence[str], defaults: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Takes a command's own flags out of a command line that is otherwise that of `train`.

    Args:
        argv: arguments after the command.
        defaults: name of a flag, with underscores -> its value as it would be typed.

    Returns:
        Values of the flags, and the arguments that are left.

    Raises:
        ConfigError: a flag without its value.
    """
    own, rest, tokens = dict(defaults), [], iter(argv)
    for token in tokens:
        name, equals, value = token.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not token.startswith("--") or key not in own:
            rest.append(token)
            continue
        following = value if equals else next(tokens, None)
        if following is None:
            raise ConfigError(f"{token} needs a value")
        own[key] = following
    return own, rest
