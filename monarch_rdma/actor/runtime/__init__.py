"""How messages travel and what becomes of them: frames, ways, casts, mailboxes, running actors."""
