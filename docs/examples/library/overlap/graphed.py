"""A function that is captured once and replayed on a stream of its own."""

import torch


class Graphed:
    """`function(x)` for tensors like `example`, on any accelerator."""

    def __init__(self, function, example):
        self.stream = torch.Stream(device=example.device)
        self.stream.wait_stream(torch.accelerator.current_stream())
        self.graph = torch.accelerator.Graph()
        with self.stream:
            self.input = example.clone()
            function(self.input)  # what happens in a first call alone happens here
            with self.graph:
                self.output = function(self.input)

    def __call__(self, x):
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            self.input.copy_(x)
            self.graph.replay()
            result = self.output.clone()
        torch.accelerator.current_stream().wait_stream(self.stream)
        return result
