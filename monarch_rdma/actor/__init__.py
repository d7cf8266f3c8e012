"""Actors, meshes of them, and the messages between them."""
