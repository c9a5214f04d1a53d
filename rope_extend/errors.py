"""Errors that a user can correct. The command line prints them in one line, without a traceback."""


class RopeExtendError(ValueError):
    """A request that cannot be carried out. The message says what is wrong, what was given and what to do.

    Messages name arguments as Python does, `overwrite=True`. The command line prints them as its own flags,
    `--overwrite`.
    """


class UnsupportedModelError(RopeExtendError):
    """The model's family is not supported, or not in this configuration."""


class PatchError(RopeExtendError):
    """A patch cannot be applied, would change nothing, or is not removed in reverse order."""


def followed_by(text: str, advice: str) -> str:
    """The text of an error and a further sentence; a question keeps its mark, and has no full stop."""
    text = text.rstrip(".!")
    return f"{text} {advice}" if text.endswith("?") else f"{text}. {advice}"


def refuse_if(wrong: bool, problem: str) -> None:
    """Refuse what a user gave: `problem` says what is wrong, what was given, and what to do.

    Raises:
        RopeExtendError: `wrong` is true.
    """
    if wrong:
        raise RopeExtendError(problem)
