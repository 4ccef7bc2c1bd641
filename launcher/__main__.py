"""`python -m launcher`: rplaunch, with `--watch-pid` the launcher of a script under plain python, with `--serve` one
of a session without script.

`rpruntime.session` runs this file by its path, so that no `launcher` in the user's folder stands in for it.
"""

import os
import sys

root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not getattr(sys.flags, "safe_path", False):
    # This folder, whose files are no top-level modules; or under `-m` the working directory, whose `secrets.py` is
    # the user's and not the standard library's.
    del sys.path[0]
if root not in sys.path:
    sys.path.append(root)

if "--watch-pid" in sys.argv[1:2]:
    from launcher.serve import main as serve

    sys.exit(serve(sys.argv[1:]))
elif "--serve" in sys.argv[1:2]:
    from launcher.serving import serve_detached

    sys.exit(serve_detached(sys.argv[2:]))
else:
    from launcher.rplaunch import main

    sys.exit(main())
