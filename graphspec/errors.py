"""The errors graphspec raises for a user's mistake or a damaged input.

GraphspecError
├── ConfigError          a setting, or two settings together, make no sense
├── CheckpointError      a checkpoint cannot be found or read, or its tensors do not fit the model
├── ResolutionError      no registered architecture, or more than one, fits a target and draft
├── UnsupportedError     the architecture or backend cannot honour what was asked
├── BuildError           tracing, lowering or writing a bundle failed
├── BundleError          a bundle is damaged, was tampered with, or this runtime cannot run it
├── EngineError          the device failed while it ran
└── RequestError         one generation request is invalid

Every message says what was wrong, where, and what to do.
"""


class GraphspecError(Exception):
    """Base class: the command line prints its message on one line and exits 1."""


class ConfigError(GraphspecError):
    """A setting, or two settings together, make no sense."""


class CheckpointError(GraphspecError):
    """A checkpoint cannot be found or read, or its tensors do not fit the model."""


class ResolutionError(GraphspecError):
    """No registered architecture, or more than one, fits a target and draft."""


class UnsupportedError(GraphspecError):
    """The architecture or backend cannot honour what was asked."""


class BuildError(GraphspecError):
    """Tracing, lowering or writing a bundle failed."""


class BundleError(GraphspecError):
    """A bundle is damaged, was tampered with, or this runtime cannot run it."""


class EngineError(GraphspecError):
    """The device failed while it ran."""


class RequestError(GraphspecError):
    """One generation request is invalid."""
