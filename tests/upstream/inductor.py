"""The tests of Inductor, which are made for a device by a function of their own file."""

import types

DEVICES = ("cpu", "openreg")


def _check_on(device, module):
    """`check_model_gpu`, which takes its arguments to a device first, for that one."""
    theirs = module.check_model_gpu
    names = {**vars(module), "GPU_TYPE": device}
    check = types.FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__)
    check.__kwdefaults__ = theirs.__kwdefaults__
    return check


def instantiate(module):
    """For the CPU and for this device, named as PyTorch's device-generic tests are."""
    for template in ("CommonTemplate", "DynamicShapesCommonTemplate"):
        tests = getattr(module, template, None)
        if tests is None or not hasattr(module, "copy_tests"):
            continue
        if template == "CommonTemplate" and hasattr(module, "DynamicShapesCommonTemplate"):
            continue  # the other file's
        for device in DEVICES:
            check = module.check_model if device == "cpu" else _check_on(device, module)
            members = {"common": check, "device": device, "device_type": device}
            cls = type(f"{template}{device.upper()}", (module.TestCase,), members)
            module.copy_tests(tests, cls, device)
            setattr(module, cls.__name__, cls)
