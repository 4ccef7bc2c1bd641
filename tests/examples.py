"""How many examples hypothesis tries: the quick run (`-m "not slow"`, as scripts/test.sh has it) a quarter of all."""

from __future__ import annotations

from hypothesis import settings

QUICK, FULL = "quick", "full"
_DEFAULT = 100
_SHARE = 4

settings.register_profile(FULL, deadline=None, max_examples=_DEFAULT)
settings.register_profile(QUICK, deadline=None, max_examples=_DEFAULT // _SHARE)


def examples(number: int) -> settings:
    """A decorator: so many examples in the full run, a quarter in the quick one; what `@example` names is always run.

    Examples are new ones in every run, so that many quick runs find what a full one does.
    """
    quick = settings.get_current_profile_name() == QUICK
    return settings(max_examples=-(-number // _SHARE) if quick else number)
