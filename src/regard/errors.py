"""What regard raises. Every message says what is wrong, what was given, and what to do."""


class RegardError(Exception):
    """The base of every error regard raises on purpose."""


class InputError(RegardError, ValueError):
    """The arguments do not fit together, or mean nothing."""


class BackendError(RegardError, RuntimeError):
    """The backend asked for cannot run this call; the message is its reason."""


class CheckpointError(RegardError, ValueError):
    """A checkpoint is missing, broken, unsafe, or not of the model it is meant for."""
