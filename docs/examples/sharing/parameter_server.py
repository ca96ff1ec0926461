"""A parameter server: workers read its parameters in place, and send gradients back. The answer to
a gradient comes when the server's step is queued; the worker's stream waits for the step."""

import torch
import torch.multiprocessing as mp

DEVICE = "openreg:0"
STEPS = 20


def work(rank, parameters, gradients, applied):
    weight = parameters.get()  # the server's memory
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(16, 4, generator=generator).to(DEVICE)
        error = x @ weight - x.sum(1, keepdim=True)
        gradients.put((rank, x.t() @ error / 16))
        weight = applied.get()  # the same memory, after the step
    gradients.put((rank, None))


def serve(context, workers=2):
    weight = torch.zeros(4, 1, device=DEVICE)
    gradients = context.SimpleQueue()
    parameters = [context.SimpleQueue() for _ in range(workers)]
    replies = [context.SimpleQueue() for _ in range(workers)]
    processes = []
    for rank in range(workers):
        queues = parameters[rank], gradients, replies[rank]
        process = context.Process(target=work, args=(rank, *queues))
        process.start()
        parameters[rank].put(weight)
        processes.append(process)
    running = workers
    while running:
        rank, gradient = gradients.get()
        if gradient is None:
            running -= 1
            continue
        weight.sub_(gradient, alpha=0.2)
        replies[rank].put(weight)
    for process in processes:
        process.join()
    return weight


if __name__ == "__main__":
    learnt = serve(mp.get_context("spawn"))
    print(f"weights {learnt.flatten().tolist()}")
    assert (learnt - 1).abs().max().item() < 0.1
