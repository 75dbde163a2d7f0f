"""``AdapterContract``: all tests that every adapter has to pass."""

from pagedkv_adapters.testing.adapter import Engine
from pagedkv_adapters.testing.concurrency import Concurrency
from pagedkv_adapters.testing.failures import Failures
from pagedkv_adapters.testing.identical_tokens import IdenticalTokens
from pagedkv_adapters.testing.refusals import Refusals
from pagedkv_adapters.testing.reuse import Reuse


class AdapterContract(
    IdenticalTokens[Engine],
    Reuse[Engine],
    Failures[Engine],
    Refusals[Engine],
    Concurrency[Engine],
):
    """What an adapter promises that keeps an engine's KV in a ``pagedkv.Sequence``.

    Subclass it under a name that pytest collects, and implement the four abstract methods of
    ``AdapterUnderTest`` and ``num_token_ids``.
    """
