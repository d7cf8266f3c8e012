"""Values to the bodies of messages and back."""
