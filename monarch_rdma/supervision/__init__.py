"""Processes and actors that die, and a program that goes on: policies, and who is in."""
