"""The HTTP gateway: a process of its own, a client of the engine like any other."""
