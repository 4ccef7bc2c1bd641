"""The exceptions of rpruntime; a user's own exception keeps its type."""


class RoundPipeError(RuntimeError):
    """Base of every error that rpruntime raises itself."""


class ConfigError(RoundPipeError, ValueError):
    """An argument, flag or model that has to change; the message names the line to write."""


class HostMemoryError(RoundPipeError, MemoryError):
    """Host or shared memory is too small; the message gives bytes needed and available."""


class WorkerDied(RoundPipeError):
    """A device or optimizer worker ended without being asked to."""


class SessionLost(RoundPipeError):
    """The session's controller is gone or no longer answers."""


class CheckpointError(RoundPipeError):
    """A checkpoint cannot be written, or is missing, incomplete or of another model."""
