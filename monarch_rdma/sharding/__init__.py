"""Sharded tensors: who has which elements, and how they get from one layout to another."""
