"""A `torch.distributed.ProcessGroup` over `hostring.Comm`: names, options and tensor lists are translated, nothing else.

Importing this needs torch; `hostring.integrations.torch_backend` does it when the first group is made.
"""

from hostring.integrations.torch_pg.create import create
from hostring.integrations.torch_pg.group import ProcessGroup

__all__ = ["ProcessGroup", "create"]
