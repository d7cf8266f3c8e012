"""Fault-tolerant training: semi-synchronous replicas that come and go, and heal from each other without checkpoints.

docs/fault-tolerance.md tells how.
"""
