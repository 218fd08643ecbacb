"""Exceptions of gtp. The class says what kind of mistake it was; the message says what was given, what is
allowed and what to do.

Each class also derives from the built-in exception that Python users expect for that kind of mistake, so
`except ValueError` keeps working in code that never heard of gtp.
"""


class GTPError(Exception):
    """Base of every exception that gtp raises on purpose."""


class GTPValueError(GTPError, ValueError):
    """A wrong value: a setting, a shape, a dtype, a group or a name pattern that cannot work."""


class GTPStateError(GTPError, RuntimeError):
    """A right call at a wrong moment, such as using a weight whose runtime was closed."""


class UnsupportedError(GTPError, NotImplementedError):
    """Something gtp does not do, such as indexing a sharded weight. The message names what does work.

    Not a `TypeError`: Python's operators take one for "try the other operand", and `weight + 1` would lose the message.
    """


class MissingExtraError(GTPError, ImportError):
    """A feature needs a package that is not installed. The message names the package and the extra."""


class ProtocolError(GTPError, TypeError):
    """An implementer of `DistributedWeight` answered something the contract does not allow."""


class DesyncError(GTPError, RuntimeError):
    """Ranks of one group disagree: on the next collective, with `GTPConfig(debug=True)`; or have disagreed on what they
    reduced, found out on CPUs at the end of backward, where there are replicated gradients to carry the question."""


class PeerError(GTPError, RuntimeError):
    """Another rank died, stalled or went another way, and this rank's streams waited for it in vain."""
