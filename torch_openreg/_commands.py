"""Commands that tools print, for a shell that has none of the settings of this one."""

import shlex

_OWN = "OPENREG_SANITIZER_REPORTS"  # a tool sets it for the processes that it starts
# Variables of others that the package or its pytest plugin reads.
_OTHERS = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "PYTEST_ADDOPTS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_ORDER = ("OPENREG_SCHEDULE_SEED", "OPENREG_SCHEDULE_TAPE")


def settings(environment):
    """The variables of an environment that are in force here."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in _OTHERS or (name.startswith("OPENREG_") and name != _OWN)
    }


def command(words, environment, seed=None):
    """The command as text, with the settings of `environment` before it.

    With a seed the command runs under this schedule, whatever the environment selects.
    """
    variables = settings(environment)
    unset = []
    if seed is not None:
        unset = ["env", "-u", _ORDER[1]] if _ORDER[1] in variables else []
        variables = {name: value for name, value in variables.items() if name not in _ORDER}
        variables = {_ORDER[0]: str(seed), **variables}
    assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*unset, *assignments, shlex.join(words)])
