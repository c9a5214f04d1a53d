"""The errors that tell a user what to change; the command line prints them without a traceback."""


class RopeExtendError(ValueError):
    """A request that cannot be carried out: the message says what was wrong, received, and would work."""


class UnsupportedModelError(RopeExtendError):
    """The model's family has no adapter, or an adapter that cannot act on this configuration."""


class PatchError(RopeExtendError):
    """A patch could not be applied, would have changed nothing, or is removed out of order."""
