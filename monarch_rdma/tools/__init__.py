"""Commands that look into a running program: `monarch-rdma stacks`, `top` and `debug`."""
