"""Processes that are started again when they end: who decides, who carries it out."""
