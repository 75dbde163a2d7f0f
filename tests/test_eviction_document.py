"""docs/eviction.md and docs/traces.md: what they show to copy runs, and does what they say."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_samples import make_kv, make_spec
from store_samples import REPOSITORY

import pagedkv as pk
from pagedkv.policies import POLICY_NAMES, make_policy
from pagedkv.traces import read_trace


def blocks(document: str, language: str) -> list[str]:
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


MOONCAKE, OWN = blocks("docs/traces.md", "json")


def test_the_traces_that_are_shown_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    trace = read_trace(path)
    assert (trace.num_requests, trace.num_pages, trace.page_tokens) == (1, 14, 512)
    path.write_text(OWN)
    trace = read_trace(path)
    assert (trace.num_requests, trace.num_distinct, trace.page_nbytes) == (2, 4, 196608)


def test_all_policies_are_in_the_table() -> None:
    text = (REPOSITORY / "docs/eviction.md").read_text(encoding="utf-8")
    for name in POLICY_NAMES:
        row = rf"\| `{type(make_policy(name)).__name__}`[^|]* \| `{name}` \|"
        assert re.search(row, text), name


def test_the_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(OWN)
    spec = make_spec()
    stores = [pk.PageStore.open(tmp_path / f"{number}.zarr", spec) for number in range(2)]
    names: dict[str, Any] = {"pk": pk, "spec": spec, "system_prompt": np.arange(9)}
    caches = []
    for code in blocks("docs/eviction.md", "python"):
        if "store=store" in code:
            names["store"] = stores.pop()
        if "retain" in code:
            with names["cache"].open_sequence(names["system_prompt"]) as sequence:
                sequence.append(*make_kv(spec, 9), names["system_prompt"])
            names["keys"] = pk.page_keys(spec, names["system_prompt"])
        exec(compile(code, "docs/eviction.md", "exec"), names)
        if "cache =" in code:
            caches.append(names["cache"])
    printed = capsys.readouterr().out.splitlines()
    names_printed = [line.split()[0] for line in printed]
    assert names_printed == ["lru", "deepest-first", "clairvoyant"]
    assert {float(line.split()[1]) for line in printed} == {2 / 6}  # nothing has to leave
    for cache in caches:
        cache.close()
    assert len(caches) == 3
    assert not stores


def test_the_policy_that_is_shown_keeps_the_contract() -> None:
    names: dict[str, Any] = {}
    exec(next(code for code in blocks("docs/eviction.md", "python") if "class" in code), names)
    policy: pk.EvictionPolicy = names["DeepestFirst"]()
    policy.start(8)
    pages = [pk.page_keys(make_spec(), np.arange(start, start + 16)) for start in (0, 50)]
    for keys in pages:
        policy.use(keys, [None, *keys[:-1]])
    assert len(policy) == 8
    assert list(policy.victims()) == list(policy.upcoming())
    assert [*islice(policy.victims(), 2)] == [pages[0][3], pages[1][3]]
    policy.hold(pages[0][:4])
    assert list(policy.victims()) == list(pages[1])[::-1]
    policy.evict(pages[1][3:])
    policy.discard(pages[0][3:])
    policy.use(pages[0][:3], [None, *pages[0][:2]])
    assert len(policy) == 6
    with pk.PagedKVCache(make_spec(), 4, policy=names["DeepestFirst"]()) as cache:
        for start in range(0, 90, 10):
            tokens = np.concatenate([np.arange(8), np.arange(start, start + 8) + 100])
            with cache.open_sequence(tokens) as sequence:
                found = sequence.num_tokens
                k, v = make_kv(make_spec(), 16)
                sequence.append(k[:, found:], v[:, found:], tokens[found:])
        cache.check_invariants()
        assert cache.match(pk.page_keys(make_spec(), np.arange(8))) == 2  # the roots stayed
