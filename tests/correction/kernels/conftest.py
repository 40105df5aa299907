"""Where there is no GPU, Triton interprets its kernels: it asks the environment when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
