"""The frontend: scheduler, worker pool, ZeroMQ server, clients and the Python API. Never imports torch."""
