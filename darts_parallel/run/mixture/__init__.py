"""Routed experts: their modules, and the exchange of tokens between the ranks that hold them."""
