"""Puts ``mad_worker`` in the place of worker processes; the engine's own process stays itself."""

import os
import sys

if "omni_engine.worker.process" in sys.orig_argv:
    import mad_worker

    os._exit(mad_worker.main())
