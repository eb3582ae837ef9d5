"""New keys and values for a cache in pages, in NumPy: which slots have them, and what fp8 makes of them."""

from __future__ import annotations

import numpy as np
import pytest

import flashcli
from flashcli.asked.decode import LAYOUTS, cache_shapes
from flashcli.files.decode.tensors import dtype

HEADS, D, PAGE, PAGES = 2, 32, 4, 6
SLOTS = np.array([5, -1, 23, 8])


def caches(layout: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    of = dtype(kind)
    keys, values = cache_shapes(layout, PAGES, HEADS, PAGE, D, of.itemsize)
    return np.full(keys, 7, of), np.full(values, 7, of)


def slot(cache: np.ndarray, layout: str, which: int) -> np.ndarray:
    """The numbers [heads, D] of a slot, by its number."""
    page, at = divmod(which, PAGE)
    if layout == "nhd":
        return cache[page, at]
    if layout == "hnd":
        return cache[page, :, at]
    return cache[page, :, :, at].reshape(HEADS, D)


def rows(kind: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0).normal(size=(2, len(SLOTS), HEADS, D))
    return drawn[0].astype(dtype(kind)), drawn[1].astype(dtype(kind))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_each_token_is_in_its_slot_and_the_other_slots_are_as_they_were(layout, kind):
    (key, value), (key_cache, value_cache) = rows(kind), caches(layout, kind)
    assert flashcli.write_kv(key, value, key_cache, value_cache, SLOTS, layout=layout) is None
    for new, cache in ((key, key_cache), (value, value_cache)):
        for which in range(PAGES * PAGE):
            want = new[SLOTS.tolist().index(which)] if which in SLOTS else np.full((HEADS, D), 7, dtype(kind))
            np.testing.assert_array_equal(slot(cache, layout, which), want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_fp8_has_numbers_over_their_scale_to_the_nearest_and_none_beyond_the_largest(layout, kind, largest):
    (key, value), (key_cache, value_cache) = rows("float16"), caches(layout, kind)
    key[0, 0, :4] = np.inf, -np.inf, np.nan, 60000
    flashcli.write_kv(key, value, key_cache, value_cache, SLOTS, layout=layout, k_scale=0.1, v_scale=np.float32(4))
    all_numbers = np.arange(256, dtype=np.uint8).view(dtype(kind)).astype(np.float64)
    all_numbers = np.unique(all_numbers[np.isfinite(all_numbers)])
    for new, cache, scale in ((key, key_cache, np.float32(0.1)), (value, value_cache, np.float32(4))):
        got = slot(cache, layout, 5).astype(np.float64).reshape(-1)
        wanted = (new[0].astype(np.float32) / scale).reshape(-1)
        for number, want in zip(got, wanted, strict=True):
            if np.isnan(want):
                assert np.isnan(number)
            else:
                assert abs(number - want) == np.abs(all_numbers - want).min() or abs(number) == largest < abs(want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_has_numbers_over_their_scale_rounded_to_even_and_cut_to_its_range_and_what_is_none_is_0(layout):
    (key, value), (key_cache, value_cache) = rows(), caches(layout, "int8")
    key[0, 0, :8] = 0.25, 0.75, -0.25, -64.25, 63.75, 1e30, -np.inf, np.nan
    flashcli.write_kv(key, value, key_cache, value_cache, SLOTS, layout=layout, k_scale=0.5, v_scale=np.float32(0.01))
    assert slot(key_cache, layout, 5)[0, :8].tolist() == [0, 2, 0, -128, 127, 127, -128, 0]
    want = np.rint(value[0] / np.float32(0.01))
    np.testing.assert_array_equal(slot(value_cache, layout, 5), np.clip(want, -128, 127))
    assert (want < -128).any() and (want > 127).any()


def test_bytes_are_fp8_if_the_caller_says_so():
    (key, value), (key_cache, value_cache) = rows("bfloat16"), caches("nhd", "float8_e5m2")
    as_bytes = key_cache.copy().view(np.uint8), value_cache.copy().view(np.uint8)
    flashcli.write_kv(key, value, key_cache, value_cache, SLOTS, layout="nhd")
    flashcli.write_kv(key, value, *as_bytes, SLOTS, layout="nhd", cache_dtype="float8_e5m2")
    np.testing.assert_array_equal(as_bytes[0], key_cache.view(np.uint8))
    np.testing.assert_array_equal(as_bytes[1], value_cache.view(np.uint8))


def test_what_has_been_written_is_what_decode_reads():
    rng = np.random.default_rng(1)
    key, value = rng.normal(size=(2, 11, HEADS, D)).astype(np.float32)
    query = rng.normal(size=(1, HEADS, D)).astype(np.float32)
    key_cache, value_cache = caches("vllm", "float32")
    table, slots = np.array([[4, 1, 5]], np.int32), np.array([16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22])
    flashcli.write_kv(key, value, key_cache, value_cache, slots)
    out = flashcli.decode(query, key_cache, value_cache, table, np.array([11], np.int32), backend="cpu")
    q, k, v = query.swapaxes(0, 1), key.swapaxes(0, 1), value.swapaxes(0, 1)
    np.testing.assert_allclose(out[0], flashcli.attention(q, k, v, backend="cpu")[:, 0], rtol=1e-5, atol=1e-6)


def test_of_two_tokens_with_one_slot_the_later_one_stays_and_no_token_changes_nothing():
    (key, value), (key_cache, value_cache) = rows(), caches("hnd", "float32")
    flashcli.write_kv(key, value, key_cache, value_cache, np.array([3, 3, -1, -1]), layout="hnd")
    np.testing.assert_array_equal(slot(key_cache, "hnd", 3), key[1])
    before = key_cache.copy()
    flashcli.write_kv(key[:0], value[:0], key_cache, value_cache, SLOTS[:0], layout="hnd")
    np.testing.assert_array_equal(key_cache, before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": np.zeros((4, 2, 32))}, "key is float64, not float32, float16, bfloat16"),
        ({"value": np.zeros((4, 2, 32), np.float16)}, "value is float16, not float32, as key is"),
        ({"value": np.zeros((4, 1, 32), np.float32)}, r"value has shape \[4, 1, 32\], where \[4, 2, 32\]"),
        ({"key": np.zeros((4, 64), np.float32)}, r"key has shape \[4, 64\], where 3 dimensions are wanted"),
        ({"key_cache": np.zeros((6, 4, 2, 32), np.float16)}, "key_cache is float16 and its value_cache float32"),
        ({"key_cache": np.zeros((6, 4, 3, 32), np.float32)}, "where .* is wanted"),
        ({"slot_mapping": SLOTS.astype(np.int32)}, "slot_mapping is int32, not int64"),
        ({"slot_mapping": SLOTS[:3]}, r"slot_mapping has shape \[3\], where \[4\] is wanted"),
        ({"slot_mapping": SLOTS + 1}, r"slot_mapping\[2\] is 24, not below 24, the cache's slots"),
        ({"layout": "dhn"}, "layout must be one of vllm, nhd, hnd, not 'dhn'"),
        ({"cache_dtype": "float8_e5m2"}, "cache_dtype is for caches of uint8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_cannot_be_written_is_refused_in_words_and_nothing_is_written(change, words):
    (key, value), (key_cache, value_cache) = rows(), caches("nhd", "float32")
    given = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": SLOTS,
        "layout": "nhd",
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        flashcli.write_kv(**given | change)
    assert (key_cache == 7).all() and (value_cache == 7).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k_scale": 0.0}, "k_scale is 0.0, in float32 not a finite number other than 0"),
        ({"k_scale": 1e300}, "k_scale is 1e\\+300, in float32"),
        ({"v_scale": 1e-300}, "v_scale is 1e-300, in float32"),
        ({"v_scale": np.nan}, "v_scale is nan"),
    ],
    ids=str,
)
def test_factors_that_fp8_cannot_be_divided_by_are_refused_and_those_of_another_cache_are_ignored(change, words):
    with pytest.raises(ValueError, match=words):
        flashcli.write_kv(*rows(), *caches("nhd", "float8_e5m2"), SLOTS, layout="nhd", **change)
    plain, given = caches("nhd", "float32"), caches("nhd", "float32")
    flashcli.write_kv(*rows(), *plain, SLOTS, layout="nhd")
    flashcli.write_kv(*rows(), *given, SLOTS, layout="nhd", **change)
    np.testing.assert_array_equal(plain, given)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"key": [1.0]}, "key must be a NumPy array, not list"),
        ({"slot_mapping": SLOTS.astype(">i8")}, "slot_mapping must have this machine's byte order"),
        ({"k_scale": np.ones(2)}, r"k_scale must be a number or one float32, not float64 \[2\]"),
        ({"value": np.ma.zeros(3, np.float32)}, "value must not be a masked array"),
        ({"v_scale": "2"}, "v_scale must be a number or one float32"),
    ],
    ids=str,
)
def test_what_is_no_array_or_number_is_refused_in_words(change, complaint):
    (key, value), (key_cache, value_cache) = rows(), caches("nhd", "float32")
    arrays = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": SLOTS}
    with pytest.raises((TypeError, ValueError), match=complaint):
        flashcli.write_kv(**arrays | change, layout="nhd")
    assert (key_cache == 7).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_token_changes_nothing(layout):
    (key, value), (key_cache, value_cache) = rows(), caches(layout, "float32")
    flashcli.write_kv(key[:0], value[:0], key_cache, value_cache, SLOTS[:0], layout=layout)
    flashcli.write_kv(key, value, key_cache, value_cache, np.full_like(SLOTS, -1), layout=layout)
    assert (key_cache == 7).all() and (value_cache == 7).all()


def test_a_cache_that_cannot_be_written_to_is_refused():
    (key, value), (key_cache, value_cache) = rows(), caches("nhd", "float32")
    with pytest.raises(TypeError, match="value_cache must be a NumPy array, not list"):
        flashcli.write_kv(key, value, key_cache, value_cache.tolist(), SLOTS, layout="nhd")
    key_cache.flags.writeable = False
    with pytest.raises(ValueError, match="key_cache must be writeable"):
        flashcli.write_kv(key, value, key_cache, value_cache, SLOTS, layout="nhd")
