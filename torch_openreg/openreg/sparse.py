"""Sparse tensor classes of one dtype, as torch.cuda.sparse has them: ``sparse.FloatTensor``."""

from ._typed import tensor_classes
from ._utils import OWN_MODULE

globals().update(tensor_classes(f"{OWN_MODULE}.sparse"))
