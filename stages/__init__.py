"""Stage configuration, pipeline contracts, family table and the bundled model."""
