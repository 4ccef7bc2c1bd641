"""The controller: a pure machine that turns calls and messages into tasks and frees, and the shell around it."""
