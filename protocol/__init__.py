"""What crosses a process boundary: requests, outputs, plans, errors, codec. Never imports torch."""
