"""Parts of screens. None of them asks the daemon anything."""
