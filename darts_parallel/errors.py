"""The errors a user can cause. Each message is one sentence: key, value, rule, nearest legal value."""


class DartsParallelError(Exception):
    """Base of all errors that the command reports as one sentence with exit status 2."""


class ConfigError(DartsParallelError, ValueError):
    """A value that breaks a rule of the configuration."""


class PlanError(DartsParallelError, ValueError):
    """A plan that is broken, or that belongs to another problem."""


class InfeasibleError(DartsParallelError, ValueError):
    """No plan of the space satisfies all constraints; the message names the binding one."""


class UnsupportedError(DartsParallelError, ValueError):
    """A legal wish that this version cannot serve."""
