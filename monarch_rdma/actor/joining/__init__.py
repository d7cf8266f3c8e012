"""How processes that did not start each other come together."""
