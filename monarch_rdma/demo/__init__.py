"""`monarch-rdma demo`: moves a real model's weights between processes over every lane of this host, and compares each
byte. run.py is the play, worker.py one process of it."""
