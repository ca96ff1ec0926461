"""Random numbers: a default generator for each device, a seed and a counter on the host.

No function here uses a device. A seed that is set before first use is kept until the generator is
made.
"""

from collections.abc import Sequence

import torch

from .. import _C
from ._utils import OWN_NAME, device_index, type_name

__all__ = [
    "default_generators",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1


def _seed_bits(seed):
    seed = int(seed)
    if not _SEED_MIN <= seed <= _SEED_MAX:
        raise ValueError(f"a seed must be from {_SEED_MIN} to {_SEED_MAX}, got {seed}")
    return seed & _SEED_MAX


class _DefaultGenerators(Sequence):
    """A sequence of the default generators, one for each device. A generator is created at its
    first access, which does not use its device."""

    def __len__(self):
        return _C._device_count()

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not 0 <= index < len(self):
            raise IndexError(
                f"{type_name()} device index {index} is out of range: there are {len(self)} devices"
            )
        return _C._default_generator(index)

    def __repr__(self):
        return repr(tuple(self))


default_generators = _DefaultGenerators()


def _get_generator(device):
    """The default generator of `device`."""
    return _C._default_generator(device_index(device))


def _get_rng_state_offset(device=OWN_NAME):
    """The number of draws from the default generator of `device` since it was seeded."""
    return _get_generator(device).get_offset()


def _set_rng_state_offset(offset, device=OWN_NAME):
    """Makes the default generator of `device` continue after `offset` draws with its seed."""
    _get_generator(device).set_offset(offset)


def manual_seed(seed):
    """Seeds the current device's default generator.

    Args:
        seed: a whole number from -2**63 to 2**64 - 1; others raise ValueError.
    """
    _get_generator(None).manual_seed(_seed_bits(seed))


def manual_seed_all(seed):
    """Seeds the default generators of all devices with `seed`: see manual_seed. torch.manual_seed
    calls it."""
    _C._manual_seed_all(_seed_bits(seed))


def seed():
    """Seeds the current device's default generator from the system's randomness."""
    _get_generator(None).seed()


def seed_all():
    """Seeds all default generators with one seed from the system's randomness."""
    manual_seed_all(torch.Generator().seed())


def initial_seed():
    """The seed of the current device's default generator."""
    return _get_generator(None).initial_seed()


def get_rng_state(device=OWN_NAME):
    """The state of the default generator of `device`: a byte tensor on the CPU."""
    return _get_generator(device).get_state()


def get_rng_state_all():
    """A list of the states of all default generators, in the order of the devices."""
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state, device=OWN_NAME):
    """Sets the state of the default generator of `device`.

    Args:
        new_state: what get_rng_state has returned; a tensor of another size raises ValueError.
        device: the device.
    """
    _get_generator(device).set_state(new_state)


def set_rng_state_all(new_states):
    """Sets the states of the default generators.

    Args:
        new_states: one for each device, in their order: what get_rng_state_all has returned.
    """
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
