"""The host store: shared-memory segments, the arenas cut from them, and the handles that name bytes in them."""
