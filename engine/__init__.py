"""The frontend: scheduler, workers, ZeroMQ server, clients, Python API. Never imports torch."""
