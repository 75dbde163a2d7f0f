"""PagedKV for Hugging Face transformers: ``model.generate(input_ids, cache=PagedCache(...))``."""

from pagedkv_adapters.transformers.model_fingerprint import fingerprint
from pagedkv_adapters.transformers.model_spec import spec_for
from pagedkv_adapters.transformers.paged_cache import PagedCache

__all__ = ["PagedCache", "fingerprint", "spec_for"]
