"""PagedKV for Hugging Face transformers: ``model.generate(input_ids, cache=PagedCache(...))``.

Importing it makes ``attn_implementation="pagedkv"`` known to transformers.
"""

from pagedkv_adapters.transformers.attention import register
from pagedkv_adapters.transformers.model_fingerprint import fingerprint
from pagedkv_adapters.transformers.model_spec import spec_for
from pagedkv_adapters.transformers.paged_cache import PagedCache

__all__ = ["PagedCache", "fingerprint", "spec_for"]

register()
