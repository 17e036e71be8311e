"""For all tests: one thread for torch. The models are small; on a busy machine threads would wait for each other."""

import torch

torch.set_num_threads(1)
