"""A script that waits for its session."""

import rpruntime.session

rpruntime.session.current().wait_ready()
print("fine")
