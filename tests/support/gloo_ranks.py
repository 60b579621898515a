"""What the fork server of `gloo_pool` imports once, so that ranks start in milliseconds."""

import torch
import torch.distributed
import torch.distributed._functional_collectives
import torch.fx.experimental.proxy_tensor

from tests.support import fsdp_model

__all__ = ["fsdp_model", "torch"]
