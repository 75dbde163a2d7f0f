"""Why a prompt hits as far as it does in a store: every reason, made for real."""

import io
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_samples import (
    all_files,
    make_eviction_rings,
    make_pages,
    make_smooth_pages,
    make_spec,
)

import pagedkv as pk
from pagedkv import cli, explain, files
from pagedkv import format as fmt
from pagedkv.errors import StoreError
from pagedkv.evictions import EvictionReason, EvictionRing
from pagedkv.explain import explain_prefix
from pagedkv.explanation import StopReason, Tier
from pagedkv.format import PageEntry
from pagedkv.prefix import chain_key
from pagedkv.spec import KVSpec
from pagedkv.store import PageStore
from pagedkv.verify import verify_store

SPEC = make_spec()
TOKENS = np.arange(24)
"""Six pages of four tokens."""
T = SPEC.page_tokens


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch, no_fsync: None) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 2)


def entries_of(
    tokens: Any = TOKENS,
    salt: bytes = b"",
    extra: Sequence[bytes] | None = None,
    spec: KVSpec = SPEC,
) -> list[PageEntry]:
    keys = pk.page_keys(spec, tokens, salt, extra)
    return [
        PageEntry(key=key, parent=parent, tokens=ids, num_tokens=len(ids), salt=salt)
        for key, parent, ids in zip(keys, keys.parents, keys.tokens, strict=True)
    ]


MAIN = entries_of()


def write(path: Path, *runs: list[PageEntry], group: int = 0, **options: Any) -> Path:
    options.setdefault("spec", None if path.exists() else SPEC)
    with PageStore.open(path, **options) as store:
        for entries in runs:
            store.write(group, entries, make_pages(store.specs[group], len(entries)))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


def segment_of(path: Path, page: int, array: str) -> Path:
    """The file of the segment of two pages that has this one."""
    num_dimensions = {"kv": 6, "catalog": 2}[array]
    return path / "lane-0000" / "group-0" / array / fmt.chunk_name(page // 2, num_dimensions)


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_all_pages_are_there(path: Path) -> None:
    write(path, MAIN)
    before = all_files(path)
    found = explain_prefix(path, [*TOKENS, 7])
    assert all_files(path) == before
    assert found.reason is StopReason.COMPLETE
    assert (found.num_tokens, found.num_full_pages, found.page_tokens) == (25, 6, 4)
    assert (found.num_pages, found.num_found_tokens) == (6, 24)
    assert (found.stop_page, found.stop_token, found.stop_group) == (None, 24, None)
    (group,) = found.groups
    assert (group.num_pool_pages, group.num_spill_pages, group.num_store_pages) == (0, 0, 6)
    assert (group.key, group.parent, group.notes) == (None, MAIN[-1].key, ())
    assert "6 in the store" in str(found)
    assert "all full pages are there" in str(found)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_prompt_without_a_full_page(path: Path, num_tokens: int) -> None:
    write(path, MAIN)
    found = explain_prefix(path, TOKENS[:num_tokens])
    assert found.reason is StopReason.TOO_SHORT
    assert (found.num_pages, found.stop_page, found.groups[0].common_tokens) == (
        0,
        None,
        num_tokens,
    )
    assert "shorter than a page" in str(found)


def test_a_page_that_was_never_written(path: Path) -> None:
    write(path, MAIN[:4])
    found = explain_prefix(path, TOKENS)
    assert found.reason is StopReason.NEVER_WRITTEN
    assert (found.num_pages, found.stop_page, found.stop_token) == (4, 4, 16)
    assert (found.stop_group, found.groups[0].key) == ("0", MAIN[4].key)
    assert found.groups[0].num_pages_behind == 0
    assert "stops at: page 4, token 16" in str(found)
    assert explain_prefix(path, TOKENS + 100).num_pages == 0


def test_pages_behind_a_gap_are_counted(path: Path) -> None:
    write(path, MAIN[:2], MAIN[3:])
    found = explain_prefix(path, TOKENS)
    (group,) = found.groups
    assert (found.num_pages, found.reason) == (2, StopReason.NEVER_WRITTEN)
    assert (group.num_pages_behind, group.first_page_behind) == (3, 3)
    assert "3 later pages are there, from page 3 on, unreachable" in str(found)


def test_a_page_that_had_to_go_for_others(path: Path) -> None:
    before, spec = time.time_ns(), make_spec(head_dim=64)
    main = entries_of(spec=spec)
    with PageStore.open(path, spec, max_nbytes="2MiB") as store:
        for start in range(0, 6, 2):
            store.write(0, main[start : start + 2], make_pages(spec, 2))
        number = 0
        while store.find(main[-1].key) is not None:
            number += 1
            assert number < 200
            others = entries_of(TOKENS[:8] + 100 * number, spec=spec)
            store.touch([row for entry in main[:2] if (row := store.find(entry.key))])
            store.write(0, others, make_pages(spec, 2))
    found = explain_prefix(path, TOKENS)
    (group,) = found.groups
    assert (found.reason, found.num_pages) == (StopReason.EVICTED, 2)
    assert group.eviction is not None
    assert before <= group.eviction.time_ns <= time.time_ns()
    assert (group.eviction.tier, group.eviction.cause) == (Tier.STORE, "capacity")
    assert group.eviction.policy == "lru"
    assert "its room was needed (policy lru)" in str(found)


def test_a_page_that_somebody_had_removed(path: Path) -> None:
    write(path, MAIN)
    with PageStore.open(path) as store:
        store.collect("1KiB")
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.EVICTED, 0)
    assert found.groups[0].eviction is not None
    assert (found.groups[0].eviction.cause, found.groups[0].eviction.policy) == ("gc", "lru")
    assert "somebody asked for a smaller store" in str(found)


@pytest.mark.parametrize(
    ("ring_reason", "reason", "cause"),
    [
        (EvictionReason.DEAD_PARENT, StopReason.EVICTED, "dead parent"),
        (EvictionReason.DAMAGED, StopReason.CORRUPT, "damaged"),
    ],
)
def test_what_the_ring_says_of_a_page(
    path: Path, ring_reason: EvictionReason, reason: StopReason, cause: str
) -> None:
    write(path, MAIN[:3])
    ring = EvictionRing(path / "lane-0000" / "group-0" / "evicted")
    ring.add([MAIN[3].key], EvictionReason.CAPACITY, 5)
    ring.add([MAIN[3].key], ring_reason, 10**18)
    ring.add([MAIN[3].key], EvictionReason.GC, 6)  # an older one counts less, wherever it is
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (reason, 3)
    eviction = found.groups[0].eviction
    assert eviction is not None
    assert (eviction.cause, eviction.policy, eviction.time_ns) == (cause, None, 10**18)
    assert "2001-09-09 01:46:40" in str(found)


def test_a_full_ring_may_have_forgotten(path: Path) -> None:
    write(path, MAIN[:3])
    ring = EvictionRing(path / "lane-0000" / "group-0" / "evicted")
    ring.add([entry.key for entry in MAIN[4:] * 512], EvictionReason.GC, 10**18)
    found = explain_prefix(path, TOKENS)
    assert found.reason is StopReason.NEVER_WRITTEN
    assert "last 1,024 evictions only, back to 2001-09-09" in found.groups[0].notes[0]


@pytest.mark.parametrize("codec", ["raw", "int8", "lossless"])
def test_a_page_with_damaged_bytes(path: Path, codec: str) -> None:
    spec = replace(SPEC, head_dim=64)
    entries = entries_of(spec=spec)
    with PageStore.open(path, spec, codec=codec) as store:
        store.write(0, entries, make_smooth_pages(spec, 6))
    good = segment_of(path, 3, "kv").read_bytes()
    size = len(good)
    for at in (size // 2 - 100, 10):
        damage(segment_of(path, 3, "kv"), at)
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.CORRUPT, 2)
    assert found.groups[0].key == entries[2].key
    assert "their CRC32C is wrong" in found.groups[0].detail
    assert found.groups[0].num_pages_behind == 3
    segment_of(path, 3, "kv").write_bytes(good[:10])
    assert "lies beyond the end of the file" in str(explain_prefix(path, TOKENS))
    segment_of(path, 3, "kv").write_bytes(good)
    assert explain_prefix(path, TOKENS).reason is StopReason.COMPLETE


def test_another_lane_has_a_good_copy(path: Path) -> None:
    write(path, MAIN)
    with PageStore.open(path) as store:
        lane = path / "lane-0001"
        lane.mkdir()
        assert store.num_pages == 6
    (path / "lane-0000" / "group-0").rename(lane / "group-0")
    write(path, MAIN)
    assert not segment_of(path, 0, "kv").exists()  # the pages are in lane 1 alone
    with PageStore.open(path) as store:
        store.write(0, [replace(MAIN[0], key=MAIN[0].key)], make_pages(SPEC, 1))
    twin = path / "lane-0000" / "group-0"
    for array in ("kv", "catalog"):
        for chunk in (lane / "group-0" / array).glob("c.*"):
            (twin / array / chunk.name).write_bytes(chunk.read_bytes())
    damage(segment_of(path, 0, "kv"), 10)
    assert explain_prefix(path, TOKENS).reason is StopReason.COMPLETE
    damage(lane / "group-0" / "kv" / segment_of(path, 0, "kv").name, 10)
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.CORRUPT, 0)


def test_a_record_in_a_torn_catalogue(path: Path) -> None:
    write(path, MAIN)
    damage(segment_of(path, 2, "catalog"), -2)  # the chunk's checksum, no record
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.CORRUPT, 2)
    assert "catalogue is torn, though its own record is right" in found.groups[0].detail
    assert found.groups[0].num_pages_behind == 2
    segment_of(path, 2, "catalog").write_bytes(b"nothing")
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.NEVER_WRITTEN, 2)
    assert "1 segments have records that cannot be read" in found.groups[0].notes[0]


@pytest.mark.parametrize("has_ring", [True, False])
def test_a_damaged_page_that_a_repair_dropped(path: Path, has_ring: bool) -> None:
    write(path, MAIN)
    if has_ring:
        make_eviction_rings(path)
    damage(segment_of(path, 2, "kv"), 10)
    nbytes = sum(map(len, all_files(path).values()))
    assert verify_store(path, repair=True).is_clean
    assert sum(map(len, all_files(path).values())) <= nbytes
    assert verify_store(path).findings == ()
    found = explain_prefix(path, TOKENS)
    assert found.num_pages == 2
    # The ring is not made for one small page: the store may be at its bound.
    assert found.reason is (StopReason.CORRUPT if has_ring else StopReason.NEVER_WRITTEN)


def test_a_segment_that_is_gone(path: Path) -> None:
    write(path, MAIN)
    segment_of(path, 4, "kv").unlink()
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.CORRUPT, 4)
    assert "lane-0000/group-0/kv/c.2.0.0.0.0.0 is gone" in found.groups[0].detail


def test_a_page_that_leaves_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, MAIN)
    read_store = explain.read_store

    def read_then_remove(place: Path) -> Any:
        result = read_store(place)
        for array in ("catalog", "kv"):
            segment_of(path, 2, array).unlink()
        return result

    monkeypatch.setattr(explain, "read_store", read_then_remove)
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.EVICTED, 2)
    assert found.groups[0].detail == "it left just now"


def test_the_prompt_is_for_another_model(path: Path) -> None:
    write(path, MAIN[:5])
    found = explain_prefix(path, TOKENS, model="sha256:other")
    assert (found.reason, found.num_pages, found.stop_page) == (StopReason.OTHER_MODEL, 0, 0)
    assert (found.model, found.stored_model) == ("sha256:other", "sha256:test")
    assert found.groups[0].num_pages_elsewhere == 5
    assert found.groups[0].key == pk.page_keys(replace(SPEC, model="sha256:other"), TOKENS)[0]
    for name in ("sha256:other", "sha256:test", "first 5 pages"):
        assert name in str(found)
    assert explain_prefix(path, TOKENS, model="sha256:test").num_pages == 5


def test_tokens_under_another_salt(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, entries_of(TOKENS[:8]), entries_of(TOKENS[:20], b"tenant"))
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.OTHER_SALT, 2)
    assert found.groups[0].num_pages_elsewhere == 5
    assert "first 5 pages of these tokens" in str(found)
    assert "tenant" not in str(found)
    assert explain_prefix(path, TOKENS, salt=b"tenant").num_pages == 5
    assert explain_prefix(path, TOKENS, salt=b"third").num_pages == 0
    other_end = np.concatenate([TOKENS[:8], TOKENS[8:] + 50])
    assert explain_prefix(path, other_end).reason is StopReason.NEVER_WRITTEN

    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.NEVER_WRITTEN, 2)
    assert found.groups[0].num_pages_elsewhere == 0
    assert "belongs to another user" in found.groups[0].notes[0]


def test_tokens_with_another_extra(path: Path) -> None:
    extra = [b"", b"lora", b"lora"]
    write(path, entries_of(TOKENS[:12], extra=extra))
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.OTHER_EXTRA, 1)
    assert found.groups[0].num_pages_elsewhere == 3
    assert explain_prefix(path, TOKENS[:13], extra=extra).reason is StopReason.COMPLETE
    assert explain_prefix(path, TOKENS[:4], extra=b"").reason is StopReason.COMPLETE
    with pytest.raises(ValueError, match="extra names 2 pages, but the tokens fill 6"):
        explain_prefix(path, TOKENS, extra=extra[:2])


def test_an_evicted_page_is_not_blamed_on_another_salt(path: Path) -> None:
    write(path, MAIN)
    with PageStore.open(path) as store:
        store.collect("1KiB")
    write(path, entries_of(salt=b"tenant"))
    assert explain_prefix(path, TOKENS).reason is StopReason.EVICTED


def test_a_store_without_token_ids_says_what_it_cannot_tell(path: Path) -> None:
    write(path, MAIN[:2], entries_of(salt=b"tenant"), store_tokens=False)
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.NEVER_WRITTEN, 2)
    assert "keeps no token ids" in found.groups[0].notes[0]


@pytest.fixture
def two_groups(path: Path) -> Path:
    specs = [make_spec(group="full"), make_spec(group="window", num_layers=2)]
    with PageStore.open(path, specs) as store:
        for number, count in enumerate((6, 4)):
            store.write(
                number, entries_of(spec=specs[number])[:count], make_pages(specs[number], count)
            )
    return path


def test_a_page_that_one_layer_group_lacks(two_groups: Path) -> None:
    found = explain_prefix(two_groups, TOKENS)
    assert (found.reason, found.num_pages) == (StopReason.MISSING_IN_GROUP, 4)
    assert (found.stop_group, found.stop_page) == ("window", 4)
    full, window = found.groups
    assert (full.num_pages, full.reason) == (6, StopReason.COMPLETE)
    assert (window.num_pages, window.reason) == (4, StopReason.NEVER_WRITTEN)
    assert "layer group window lacks a page that full has; the page was never" in str(found)


def test_one_layer_group_alone(two_groups: Path) -> None:
    found = explain_prefix(two_groups, TOKENS, group="full")
    assert (found.reason, len(found.groups)) == (StopReason.COMPLETE, 1)
    with pytest.raises(ValueError, match="no layer group 'x': it has full, window"):
        explain_prefix(two_groups, TOKENS, group="x")


def test_groups_that_lack_the_same_page(two_groups: Path) -> None:
    found = explain_prefix(two_groups, np.concatenate([TOKENS[:16], TOKENS]))
    assert (found.reason, found.num_pages) == (StopReason.NEVER_WRITTEN, 4)
    assert found.stop_group == "full"


def test_how_many_tokens_of_the_next_page_another_shares(path: Path) -> None:
    def common(*, salt: bytes = b"", extra: bytes | None = None) -> int:
        return explain_prefix(path, TOKENS, salt=salt, extra=extra).groups[0].common_tokens

    write(path, MAIN[:2])
    assert common() == 0
    for shared in (1, 3):
        sibling = [*TOKENS[: 8 + shared], *[99] * (T - shared)]
        write(path, entries_of(sibling))
        assert common() == shared
    assert "next tokens: a page that is there begins with the next 3 tokens" in str(
        explain_prefix(path, TOKENS)
    )
    assert common(salt=b"tenant") == common(extra=b"lora") == 0
    assert explain_prefix(path, TOKENS[:9]).groups[0].common_tokens == 1  # a rest of one token
    for rest in ([8, 9], [8, 9, 10, 11][:3]):
        tail = PageEntry(
            key=chain_key(MAIN[1].key, np.array(rest, np.int32)),
            parent=MAIN[1].key,
            tokens=np.array(rest, np.int32),
            num_tokens=len(rest),
        )
        write(path, [tail])
    assert common() == 3


def test_a_damaged_sibling_shares_nothing(path: Path) -> None:
    write(
        path, MAIN[:2], entries_of([*TOKENS[:11], 99])[2:], entries_of([*TOKENS[:9], 1, 1, 1])[2:]
    )
    assert explain_prefix(path, TOKENS).groups[0].common_tokens == 3
    damage(segment_of(path, 2, "kv"), 10)
    assert explain_prefix(path, TOKENS).groups[0].common_tokens == 1


def test_a_damaged_page_shares_nothing_with_itself(path: Path) -> None:
    write(path, MAIN[:3])
    damage(segment_of(path, 2, "kv"), 10)
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.groups[0].common_tokens) == (StopReason.CORRUPT, 0)


def test_a_store_in_use(path: Path) -> None:
    with PageStore.open(path, SPEC) as store:
        store.write(0, MAIN[:3], make_pages(SPEC, 3))
        assert explain_prefix(path, TOKENS).num_pages == 3
        store.write(0, MAIN[3:], make_pages(SPEC, 3))
        assert explain_prefix(path, TOKENS).reason is StopReason.COMPLETE


def test_pages_in_a_circle_end(path: Path) -> None:
    ids = np.arange(4, dtype=np.int32)
    one, two = pk.PageKey(bytes(32)), SPEC.root_key()
    circle = [
        PageEntry(key=one, parent=two, tokens=ids, num_tokens=4),
        PageEntry(key=two, parent=one, tokens=ids, num_tokens=4),
    ]
    write(path, circle)
    found = explain_prefix(path, np.tile(ids, 5))
    assert (found.num_pages, found.groups[0].num_pages_elsewhere) == (0, 5)


def test_what_cannot_be_explained(path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        explain_prefix(path, TOKENS)
    write(path, MAIN)
    with pytest.raises(ValueError, match="they must be in 0"):
        explain_prefix(path, [-1])
    with pytest.raises(TypeError, match="salt is 'x'"):
        explain_prefix(path, TOKENS, salt="x")  # type: ignore[arg-type]


def test_a_file_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, MAIN)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "pread_into", fail)
    found = explain_prefix(path, TOKENS)
    assert (found.reason, found.groups[0].detail) == (
        StopReason.CORRUPT,
        "cannot be read: Input/output error",
    )


# -- the command ---------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["pagedkv", "explain", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    code = exit_info.value.code
    return code if isinstance(code, int) else int(bool(code))


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS.tolist()))
    return tmp_path / "prompt.json"


def test_the_command_prints_json(
    path: Path, prompt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, entries_of(salt=b"tenant")[:4])
    assert run(monkeypatch, path, "--tokens", prompt, "--json", "--salt", "tenant") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["reason"], values["num_pages"], values["num_found_tokens"]) == (
        "never written",
        4,
        16,
    )
    assert values["groups"][0]["key"] == entries_of(salt=b"tenant")[4].key.hex()
    with PageStore.open(path) as store:
        store.collect("1KiB")
    assert run(monkeypatch, path, "--tokens", prompt, "--json", "--salt", "hex:74656e616e74") == 0
    values = json.loads(capsys.readouterr().out)
    eviction = values["groups"][0]["eviction"]
    assert (values["reason"], eviction["cause"], eviction["tier"]) == ("evicted", "gc", "store")


def test_the_command_prints_a_table(
    path: Path, prompt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, MAIN[:3], entries_of(extra=[b"lora"] * 6))
    assert run(monkeypatch, path, "--tokens", prompt) == 0
    output = capsys.readouterr().out
    for text in ("24 tokens: 6 pages of 4", "3 pages, 12 tokens (50%)", "█" * 20 + "░" * 20):
        assert text in output
    assert "page 3, token 12" in output
    assert run(monkeypatch, path, "--tokens", prompt, "--extra", "lora") == 0
    assert "all full pages are there" in capsys.readouterr().out


def test_the_command_reads_standard_input(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(path, MAIN)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"0 1 2 3 5")))
    assert run(monkeypatch, path, "--tokens", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_pages"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "/no/where"], "cannot read the tokens in /no/where"),
        (["--tokens", "{prompt}", "--group", "x"], "no layer group 'x': it has 0"),
        (["--tokens", "{prompt}", "--salt", "hex:0"], "--salt is 'hex:0'"),
        (["--tokens", "{prompt}", "--model", ""], "model is ''"),
        ([], "--tokens"),
    ],
)
def test_the_command_refuses_what_it_cannot_explain(
    path: Path,
    prompt: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(path, MAIN)
    given = [argument.format(prompt=prompt) for argument in arguments]
    assert run(monkeypatch, path, *given) == 2
    assert message in capsys.readouterr().err


def test_the_command_needs_a_store(
    path: Path, prompt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, path, "--tokens", prompt) == 2
    assert "there is no store at" in capsys.readouterr().err
