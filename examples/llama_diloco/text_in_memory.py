"""Imported by the process that trainers are forked from: the text is read once, and is there in all of them."""

from .text import Text

Text.of_python()
