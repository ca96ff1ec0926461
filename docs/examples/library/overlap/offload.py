"""Layers whose weights are on the GPU only while they compute."""

import torch


class Offloader:
    """Keeps the weights of `layers` in pinned memory, for inference.

    While a layer computes, the weights of the next one are copied.
    """

    def __init__(self, layers):
        self.layers = list(layers)
        self.stream = torch.cuda.Stream()
        self.weights = {}
        self.loaded = {}
        for layer in self.layers:
            self.weights[layer] = [p.data.pin_memory() for p in layer.parameters()]
            for parameter, weight in self._pairs(layer):
                parameter.data = weight
            layer.register_forward_pre_hook(self._before)
            layer.register_forward_hook(self._after)

    def _before(self, layer, inputs):
        self._load(layer)
        loaded = self.loaded.pop(layer)
        torch.cuda.current_stream().wait_event(loaded)
        following = self.layers.index(layer) + 1
        if following < len(self.layers):
            self._load(self.layers[following])

    def _after(self, layer, inputs, output):
        for parameter, weight in self._pairs(layer):
            parameter.data.record_stream(torch.cuda.current_stream())
            parameter.data = weight

    def _load(self, layer):
        if layer in self.loaded:
            return
        with torch.cuda.stream(self.stream):
            for parameter, weight in self._pairs(layer):
                parameter.data = weight.to("cuda", non_blocking=True)
            self.loaded[layer] = self.stream.record_event()

    def _pairs(self, layer):
        return zip(layer.parameters(), self.weights[layer], strict=True)
