"""The class that Inductor wants its users' passes to have: it asks them for their part of the cache's key."""

from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["CustomGraphPass"]
