"""A mean that is kept on a stream of its own."""

import torch


class Mean:
    """The mean of the tensors passed to `add`, on any accelerator."""

    def __init__(self, shape, device):
        self.stream = torch.Stream(device=device)
        self.count = 0
        with self.stream:
            self.total = torch.zeros(shape, device=device)

    def add(self, value):
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            self.total += value
        value.record_stream(self.stream)
        self.count += 1

    def result(self):
        with self.stream:
            mean = self.total / self.count
        torch.accelerator.current_stream().wait_stream(self.stream)
        mean.record_stream(torch.accelerator.current_stream())
        return mean
