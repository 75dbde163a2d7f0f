"""The contract of adapters as a test suite: ``AdapterContract``. It needs pytest.

Subclass it in a test module, and say in four methods how your engine is used; ``docs/adapters.md``
shows how. Only tests import this package.
"""

import pytest

# So that a failure shows the values that were compared; before they are imported.
_WITH_ASSERTIONS = ("adapter", "concurrency", "failures", "identical_tokens", "refusals", "reuse")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _WITH_ASSERTIONS))

from pagedkv_adapters.testing.adapter import AdapterUnderTest, Generated  # noqa: E402
from pagedkv_adapters.testing.contract import AdapterContract  # noqa: E402

__all__ = ["AdapterContract", "AdapterUnderTest", "Generated"]
