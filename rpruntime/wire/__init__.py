"""Messages between the processes of a session: typed classes, their bytes, and the sockets that carry them."""
