"""Perturbations of exactly the size you asked for, after clipping."""

from clipaware._api import l2_clipping_aware_rescaling, perturb, perturb_vjp, reach, report, rescale
from clipaware._check import UnreachableError
from clipaware._kernels.threads import set_threads
from clipaware._report import Report
from clipaware.quantize import perturb_quantized

__all__ = [
    "Report",
    "UnreachableError",
    "l2_clipping_aware_rescaling",
    "perturb",
    "perturb_quantized",
    "perturb_vjp",
    "reach",
    "report",
    "rescale",
    "set_threads",
]
__version__ = "0.1.0"
