"""Longest match: keys of a long prompt, many siblings, and tokens reused inside pages.

    python benchmarks/match.py [--part NAME] [--rounds 5] [--folder DIR] [--json]

``docs/benchmarks.md`` says what each case measures, and how.
"""

from measure.branching import branching
from measure.compare import run
from measure.long_prompt import long_prompt
from measure.siblings import siblings

PARTS = {"long-prompt": long_prompt, "siblings": siblings, "branching": branching}

if __name__ == "__main__":
    run("Longest match at token level", PARTS)
