"""The device ``acme`` of PyTorch: ``torch.ones(2, device="acme")``, ``torch.acme.synchronize()``.

``import torch`` is enough where the package is installed.
"""

from pathlib import Path

import torch_openreg

torch_openreg.register_device("acme", __name__, Path(__file__).with_name("driver.so"))
