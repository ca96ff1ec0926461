"""DataLoader workers that return device tensors: a batch is made on the device, and the training
process gets its memory without a copy. Workers are spawned, as a forked one may not use a device
that its parent has used."""

import torch
from torch.utils.data import DataLoader, Dataset

DEVICE = "openreg:0"


class Waves(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        phase = torch.tensor(index / 32, device=DEVICE)
        return torch.sin(torch.linspace(0, 6, 256, device=DEVICE) + phase), phase


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 1, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    loader = DataLoader(
        Waves(), 8, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    losses = []
    for _ in range(5):
        for waves, phases in loader:
            loss = (model(waves).squeeze(1) - phases).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    print(f"batches on {waves.device}, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
