"""Functions that use several streams, for tests of compilers.

Those of `made(device)` compute 2 * x + 1. A graph cannot hold those that REFUSED names.
"""

import torch

REFUSED = {"no join", "an event that the host waits for", "another device", "two devices"}


def made(device):
    side, third = torch.Stream(device), torch.Stream(device)
    far = torch.Stream(torch.device(device, 1))
    begun, ended = torch.Event(device), torch.Event(device)
    current = torch.accelerator.current_stream

    def events_of_the_program(x):
        begun.record()
        with side:
            begun.wait()
            y = x * 2
            ended.record()
        ended.wait()
        return y + 1

    def events_of_its_own(x):
        stream = torch.Stream(device)
        stream.wait_event(current().record_event())
        with stream:
            y = x * 2
        current().wait_event(stream.record_event())
        return y + 1

    def waits_for_streams(x):
        side.wait_stream(current())
        with side:
            y = x * 2
        current().wait_stream(side)
        return y + 1

    def a_chain(x):
        side.wait_stream(current())
        with side:
            y = x * 2
        third.wait_stream(side)
        with third:
            z = y + 1
        current().wait_stream(third)
        return z

    def a_stream_inside_a_stream(x):
        side.wait_stream(current())
        third.wait_stream(current())
        with side:
            y = x * 3
            with third:
                z = 1 - x
            side.wait_event(third.record_event())
            y = y + z
        current().wait_stream(side)
        return y

    def no_wait_at_the_fork(x):
        with side:
            y = x * 2
        current().wait_stream(side)
        return y + 1

    def the_current_stream_changes(x):
        before = current()
        side.wait_stream(before)
        torch.accelerator.set_stream(side)
        y = x * 2
        torch.accelerator.set_stream(before)
        before.wait_stream(side)
        return y + 1

    def a_recorded_tensor(x):
        side.wait_stream(current())
        with side:
            y = x * 2
            y.add_(1)
        y.record_stream(current())
        current().wait_stream(side)
        return y

    @torch.compiler.nested_compile_region
    def region(x):
        return x.add(1).mul(2)

    def a_region_on_two_streams(x):
        side.wait_stream(current())
        with side:
            y = region(x * 2)
        current().wait_stream(side)
        return region(y) / 4 - 0.5

    def no_join(x):
        side.wait_stream(current())
        with side:
            return x * 2 + 1

    def an_event_that_the_host_waits_for(x):
        y = x * 2
        begun.record()
        begun.synchronize()
        return y + 1

    def another_device(x):
        far.wait_stream(current())
        y = x * 2
        current().wait_stream(far)
        return y + 1

    def two_devices(x):
        far.wait_stream(current())
        with far:
            y = x.to(far.device) * 2
        current().wait_stream(far)
        return y.to(x.device) + 1

    functions = (
        events_of_the_program,
        events_of_its_own,
        waits_for_streams,
        a_chain,
        a_stream_inside_a_stream,
        no_wait_at_the_fork,
        the_current_stream_changes,
        a_recorded_tensor,
        a_region_on_two_streams,
        no_join,
        an_event_that_the_host_waits_for,
        another_device,
        two_devices,
    )
    return {f.__name__.replace("_", " "): f for f in functions}


def check(compile, function, device):
    """Calls it with inputs that move and with one that does not."""
    for moves in (True, False):
        torch._dynamo.reset()
        compiled, x = compile(function), torch.zeros(4, device=device)
        for i in range(5):
            x = torch.full_like(x, i) if moves else x.fill_(i)
            torch.accelerator.synchronize()
            made = compiled(x)
            torch.accelerator.synchronize()
            assert made.tolist() == [2 * i + 1] * 4, (function.__name__, moves, i)


def check_training(backend, device):
    """Gradients through a side stream, which the caller orders with its own."""
    side = torch.Stream(device)

    def waited(x):
        y, event = x * 2, torch.Event(device)
        event.record()
        event.synchronize()
        with side:
            z = y.sin()
        side.synchronize()
        return (z + 1,)

    def both(x):
        with side:
            z = x.sin()
        return x.cos(), z

    def gradient(function, x):
        main, given = torch.accelerator.current_stream(), x * 3
        side.wait_stream(main)
        made = function(given)
        main.wait_stream(side)
        side.wait_stream(main)
        (found,) = torch.autograd.grad(sum(m.sum() for m in made), x)
        torch.accelerator.synchronize()
        return found

    for function in waited, both:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend)
        x = torch.linspace(0, 1, 4, device=device, requires_grad=True)
        for _ in range(2):
            torch.testing.assert_close(gradient(compiled, x), gradient(function, x))
