"""What TorchCTS is told about this device: everything it asks about but a decoder of the vendor's.

TorchCTS reads the file `manifest.py` of the working directory.
"""

import torch
from torchcts.core.manifest_schema import CAPABILITY_ORDER
from torchcts.core.quantized_decoders import KNOWN_CONTAINER_FORMATS

# Hooks that a vendor writes for formats of its own.
WITHOUT = {"custom_quantized_decode"}

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex32, torch.complex64, torch.complex128),
)

manifest = {
    "manifest_version": 1,
    "device_name": "openreg",
    "backend_import": "torch_openreg",
    "device_count": 2,
    "semantic_level": 8,
    "ieee754_seed": 67,
    "max_samples": 10,
    "max_samples_ieee754": 3,
    "hardware": {"memory_model": "discrete", "device_memory_gb": "auto", "oom_recoverable": True},
    "supported_dtypes": dict.fromkeys(DTYPES, True),
    "capabilities": {name: name not in WITHOUT for name in CAPABILITY_ORDER},
    "supported_container_formats": dict.fromkeys(KNOWN_CONTAINER_FORMATS, True),
}
