"""`python -m launcher`: rplaunch, or with `--watch-pid` the launcher of a script under plain python.

`rpruntime.session` runs this file by its path, so that no `launcher` in the user's folder stands in for it.
"""

import os
import sys

if not __package__:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    del sys.path[0]  # this folder: its files are no top-level modules
    if root not in sys.path:
        sys.path.append(root)

if "--watch-pid" in sys.argv[1:2]:
    from launcher.serve import main as serve

    sys.exit(serve(sys.argv[1:]))
else:
    from launcher.rplaunch import main

    sys.exit(main())
