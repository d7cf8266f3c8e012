"""Hosts' agents and the processes that they start."""
