"""The next batch is copied to the GPU while the current one is in use."""

import torch


class Prefetcher:
    """Iterates over CPU tensors of one shape and yields them on the GPU.

    Two pinned buffers take turns: one is filled while the other is copied.
    """

    def __init__(self, batches):
        self.batches = iter(batches)
        self.stream = torch.cuda.Stream()
        self.buffers = []

    def __iter__(self):
        following = self._upload()
        while following is not None:
            batch = following
            torch.cuda.current_stream().wait_stream(self.stream)
            batch.record_stream(torch.cuda.current_stream())
            following = self._upload()
            yield batch

    def _upload(self):
        batch = next(self.batches, None)
        if batch is None:
            return None
        buffer, copied = self._buffer(batch)
        # copied.synchronize()  # is missing
        buffer.copy_(batch)
        with torch.cuda.stream(self.stream):
            uploaded = buffer.to("cuda", non_blocking=True)
            copied.record()
        return uploaded

    def _buffer(self, batch):
        """The buffer that was used longest ago, and the event of its last copy."""
        if len(self.buffers) < 2:
            self.buffers.append((torch.empty_like(batch, pin_memory=True), torch.cuda.Event()))
        else:
            self.buffers.append(self.buffers.pop(0))
        return self.buffers[-1]
