"""A `torch.distributed.ProcessGroup` over `hostring.Comm`: it only translates names, options and tensor lists.

`ProcessGroup` is the face that torch sees. Its methods call parts, each in a file of its own, that hold the Comm.
Importing this needs torch; `hostring.integrations.torch_backend` does it when the first group is made.
"""

from hostring.integrations.torch_pg.feedback_hook import FeedbackState, feedback_hook
from hostring.integrations.torch_pg.new_group import create
from hostring.integrations.torch_pg.process_group import ProcessGroup

__all__ = ["FeedbackState", "ProcessGroup", "create", "feedback_hook"]
