"""rplaunch and rpctl: session folders, child processes, their supervision and their end. No torch in here."""
