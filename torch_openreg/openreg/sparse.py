"""Sparse tensor classes of one dtype, as torch.cuda.sparse has them: ``sparse.FloatTensor``."""

from ._typed import tensor_classes

globals().update(tensor_classes("torch.openreg.sparse"))
