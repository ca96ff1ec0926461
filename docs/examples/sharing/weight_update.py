"""New weights for an inference server, by handles that travel over the program's own socket, as
vLLM and others send them: reduce_tensor() in the trainer, the function that it returns in the
server. The two processes are not related."""

import pickle
import socket
import subprocess
import sys

import torch
from torch.multiprocessing.reductions import reduce_tensor

DEVICE = "openreg:0"


def send(peer, value):
    data = pickle.dumps(value)
    peer.sendall(len(data).to_bytes(8, "big") + data)


def receive(peer):
    size = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "big")
    return pickle.loads(peer.recv(size, socket.MSG_WAITALL))


def serve(port):
    model = torch.nn.Linear(8, 1, device=DEVICE)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        send(peer, str(torch.openreg.get_device_properties(0).uuid))
        handles = receive(peer)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                rebuild, arguments = handles[name]
                parameter.copy_(rebuild(*arguments))
        torch.openreg.synchronize()
        send(peer, model(torch.ones(1, 8, device=DEVICE)).item())


def train():
    model = torch.nn.Linear(8, 1, device=DEVICE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = subprocess.Popen([sys.executable, __file__, str(port)])
        peer, _ = listener.accept()
        with peer:
            same = receive(peer) == str(torch.openreg.get_device_properties(0).uuid)
            send(peer, {name: reduce_tensor(p.detach()) for name, p in model.named_parameters()})
            answer = receive(peer)  # the weights live until here
        assert server.wait() == 0
    expected = model(torch.ones(1, 8, device=DEVICE)).item()
    print(f"one device: {same}, the server answers {answer:.6f}, expected {expected:.6f}")
    assert same and answer == expected


if __name__ == "__main__":
    serve(int(sys.argv[1])) if len(sys.argv) > 1 else train()
