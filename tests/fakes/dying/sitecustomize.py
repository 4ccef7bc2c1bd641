"""With this folder on PYTHONPATH, the workers that the fork server forks die as `dying_worker` says."""

import sys

if "rpruntime.forkserver" in sys.orig_argv:
    import rpruntime.worker.__main__ as worker
    from tests.fakes import dying_worker

    main = worker.main

    def dying() -> None:
        dying_worker.begin()
        main()

    worker.main = dying
