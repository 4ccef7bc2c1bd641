"""Names that people can say: adjective-animal."""

from __future__ import annotations

import random

# fmt: off
ADJECTIVES = (
    "agile", "amber", "azure", "bold", "brave", "brisk", "bright", "calm", "candid", "cheery", "civil",
    "clever", "coral", "cosy", "crisp", "daring", "deft", "eager", "fair", "fleet", "fond", "frank",
    "fresh", "gentle", "glad", "golden", "grand", "happy", "hardy", "honest", "humble", "jolly", "keen",
    "kind", "lively", "loyal", "lucid", "lucky", "mellow", "merry", "mild", "modest", "neat", "nimble",
    "noble", "patient", "placid", "plucky", "polite", "quick", "quiet", "rapid", "rosy", "royal",
    "serene", "sharp", "shiny", "silent", "sleek", "smart", "snowy", "sober", "spry", "steady", "still",
    "sunny", "swift", "tidy", "vivid", "warm", "wise", "witty", "zesty",
)
ANIMALS = (
    "badger", "beaver", "bison", "bobcat", "camel", "condor", "coyote", "crane", "cricket", "dingo",
    "dolphin", "eagle", "egret", "falcon", "ferret", "finch", "fox", "gannet", "gazelle", "gecko",
    "gibbon", "goose", "grouse", "hare", "hawk", "heron", "ibex", "ibis", "iguana", "impala", "jackal",
    "jaguar", "kestrel", "kite", "koala", "lark", "lemur", "leopard", "lizard", "llama", "lynx", "macaw",
    "magpie", "marmot", "marten", "moose", "newt", "ocelot", "okapi", "oriole", "osprey", "otter", "owl",
    "panda", "parrot", "pelican", "penguin", "plover", "puffin", "puma", "quail", "rabbit", "raven",
    "robin", "salmon", "seal", "sparrow", "squid", "stork", "swan", "tapir", "tern", "tiger", "toucan",
    "turtle", "walrus", "weasel", "wombat", "yak", "zebra",
)
# fmt: on


def random_name(rng: random.Random | None = None) -> str:
    """A name such as "calm-otter". The user's random state is left alone."""
    rng = rng or random.SystemRandom()
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(ANIMALS)}"
