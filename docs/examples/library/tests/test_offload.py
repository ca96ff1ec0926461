import torch
from overlap import Offloader


def test_offloaded_model_computes_what_the_model_does(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(8, 64)
    with torch.no_grad():
        expected = [model(x), model(2 * x)]
        Offloader(model)
        x = x.to(device)
        y = [model(x), model(2 * x)]
    assert all(p.device.type == "cpu" for p in model.parameters())
    torch.testing.assert_close([z.cpu() for z in y], expected)
