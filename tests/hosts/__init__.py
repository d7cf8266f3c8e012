"""Several hosts on one machine, and a network between them that is slow, lossy or cut; see `network`."""
