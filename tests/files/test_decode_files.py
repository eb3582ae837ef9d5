"""Files of paged decode: whole ones, damaged ones, foreign ones, and what the commands make of them."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import environment, flashcli, write_input

from bench import decode_judge
from flashcli.asked.decode import BlockSparse
from flashcli.cpu.decode import DecodeCpu, gather
from flashcli.cpu.pages import decode_problem
from flashcli.errors import BadInput
from flashcli.files.decode import cases as decode_cases
from flashcli.files.decode import tensors as decode_tensors
from flashcli.files.decode.cases import Case, generate, make
from flashcli.files.decode.tensors import Tensors, TensorWriter, dtype, has_tensors, read_decode
from flashcli.files.decode.verify import compare_answers
from flashcli.kernels.decode import KERNELS

SMALL = Case(2, 4, 2, 32, "20,5", page=8, query_type="float32")


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "x.safetensors"
    generate(path, SMALL)
    return path


def saved(path, tensors, metadata=None):
    """A file by the library itself, so that nothing but what it holds can be wrong."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)
    return path


def contents(path) -> dict[str, np.ndarray]:
    tensors = Tensors(path)
    return {name: np.array(tensors[name]) for name in tensors}


def changed(name, change):
    """A change of one tensor, given and returned."""
    return lambda tensors: tensors.update({name: change(tensors[name])})


def with_first(value):
    def change(array):
        array.flat[0] = value
        return array

    return change


def test_what_was_written_is_read(whole):
    asked, shape = read_decode(whole)
    made = make(SMALL)
    assert shape == (2, 4, 32) and (asked.layout, asked.scale) == (made.layout, made.scale)
    for name in ("query", "key_cache", "value_cache", "block_tables", "seq_lens"):
        np.testing.assert_array_equal(getattr(asked, name), getattr(made, name))


def with_factor(path, name: str, value: float):
    """A file whose cache is fp8, with another factor. The library would write no fp8 of NumPy's."""
    generate(str(path), dataclasses.replace(SMALL, query_type="float16", cache_type="float8_e5m2"))
    content = path.read_bytes()
    header = json.loads(content[8 : (first := 8 + int.from_bytes(content[:8], "little"))])
    at = first + header[name]["data_offsets"][0]
    path.write_bytes(content[:at] + np.float32(value).tobytes() + content[at + 4 :])
    return path


def test_a_factor_that_is_nan_is_refused(tmp_path):
    with pytest.raises(BadInput, match="k_scale is nan, not a finite number"):
        read_decode(with_factor(tmp_path / "x", "k_scale", np.nan))


def test_a_factor_beside_a_cache_that_is_not_fp8_is_left_out_with_a_notice(whole, tmp_path):
    factors = {"k_scale": np.array([7], np.float32), "v_scale": np.array([np.nan], np.float32)}
    saved(tmp_path / "with.safetensors", contents(whole) | factors, {"layout": "vllm"})
    answers = [flashcli("decode", name, "out", cwd=tmp_path) for name in ("with.safetensors", whole)]
    assert [done.code for done in answers] == [0, 0] and "k_scale" not in answers[1].err
    notice = "has a tensor k_scale, a factor on numbers of fp8 or int8, and the cache is float32: it is left out."
    assert notice in answers[0].err and "has a tensor v_scale" in answers[0].err
    asked = read_decode(tmp_path / "with.safetensors")[0]
    assert (asked.k_scale, asked.v_scale) == (1, 1)


def test_a_scale_that_float32_has_no_room_for_is_refused(whole, tmp_path):
    wrong = saved(tmp_path / "wrong.safetensors", contents(whole), {"scale": "1e300"})
    with pytest.raises(BadInput, match="scale is 1e\\+300, not a finite number"):
        read_decode(wrong)


def test_the_library_reads_our_files_and_we_read_its(whole, tmp_path):
    from safetensors.numpy import load_file

    theirs = load_file(whole)
    again = saved(tmp_path / "again.safetensors", theirs)
    for name, array in contents(whole).items():
        np.testing.assert_array_equal(theirs[name], array)
        np.testing.assert_array_equal(Tensors(again)[name], array)


WRONG = {
    "no query": (lambda tensors: tensors.pop("query"), "no tensor query"),
    "no tables": (lambda tensors: tensors.pop("block_tables"), "no tensor block_tables"),
    "a page after the last": (changed("block_tables", with_first(99)), "99"),
    "a page below 0": (changed("block_tables", with_first(-1)), "-1"),
    "a length below 0": (changed("seq_lens", with_first(-3)), "-3"),
    "a length beyond the table": (changed("seq_lens", with_first(1000)), "1000"),
    "lengths of long integers": (changed("seq_lens", lambda array: array.astype(np.int64)), "seq_lens is int64, not"),
    "queries of float64": (changed("query", lambda array: array.astype(np.float64)), "query is float64, not float32"),
    "bytes": (changed("key_cache", lambda array: np.zeros_like(array, np.uint8)), "key_cache is uint8"),
    "complex numbers": (changed("query", lambda array: array.astype(np.complex64)), "query of type C64, which is not"),
    "another type of cache": (changed("key_cache", lambda array: array.astype(np.float16)), "float16"),
    "heads that are no multiple": (changed("query", lambda array: array[:, :3]), "3"),
    "a cache of other heads": (changed("value_cache", lambda array: array[:, :1]), "value_cache"),
    "a cache without a dimension": (changed("key_cache", lambda array: array[0]), "key_cache"),
    "a sequence too few": (changed("seq_lens", lambda array: array[:1]), "seq_lens"),
    "slopes of other heads": (lambda tensors: tensors.update(alibi_slopes=np.ones(3, np.float32)), "alibi_slopes"),
    "two scales": (lambda tensors: tensors.update(v_scale=np.ones(2, np.float32)), "v_scale"),
}


@pytest.mark.parametrize("change, told", WRONG.values(), ids=list(WRONG))
def test_what_cannot_be_decoded_is_refused_in_words(whole, tmp_path, change, told):
    tensors = contents(whole)
    change(tensors)
    with pytest.raises(BadInput) as caught:
        read_decode(saved(tmp_path / "wrong.safetensors", tensors, {"layout": "vllm"}))
    assert told in str(caught.value) and "wrong.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "shape", [[0, *[1] * 64], [0, 2**62, 2]], ids=["more axes than NumPy has", "too large if not empty"]
)
def test_a_shape_that_no_array_has_is_refused_in_words(whole, tmp_path, shape):
    content = saved(tmp_path / "plain", contents(whole)).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["alibi_slopes"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end]}
    changed = json.dumps(header).encode()
    path = tmp_path / "wrong"
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    with pytest.raises(BadInput, match="has alibi_slopes of a shape that no array has, "):
        read_decode(path)


def test_metadata_may_be_null_and_a_header_spread_over_lines(whole, tmp_path):
    content = saved(tmp_path / "plain.safetensors", contents(whole)).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]) | {"__metadata__": None}, indent=1).encode()
    path = tmp_path / "spread.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    assert has_tensors(path) and read_decode(path)[0].layout == "vllm"


def test_what_has_a_name_that_means_nothing_is_told(whole, tmp_path):
    tensors = contents(whole) | {"alibi_slope": np.ones(4, np.float32)}
    metadata = {"sliding_windw": "5", "format": "pt", "layout": "vllm"}
    path = saved(tmp_path / "x", tensors, metadata)
    for command in (["decode", path, tmp_path / "y", "--backend", "cpu"], ["inspect", path]):
        done = flashcli(*command)
        assert done.code == 0 and done.err.splitlines() == [
            f"Notice: '{path}' has a tensor alibi_slope, which means nothing here: it is left out.",
            f"Notice: '{path}' has sliding_windw in its metadata, which means nothing here: it is left out.",
        ]


def test_generate_makes_block_sparse_files(tmp_path):
    for text, sparse in (("3,16,1,-1", BlockSparse(3, 16, 1, -1)), ("2,32,0,1,5", BlockSparse(2, 32, 0, 1, 5))):
        done = flashcli("generate", "x", "--force", "--decode", "2,4,2,32", "--block-sparse", text, cwd=tmp_path)
        assert done.code == 0 and read_decode(tmp_path / "x")[0].sparse == sparse
    assert flashcli("generate", "y", "--shape", "1,2,8", "--block-sparse", "2,16", cwd=tmp_path).code == 2


def test_inspect_says_all_that_a_file_asks_for(tmp_path):
    sparse = BlockSparse(3, 16, 1, -1)
    generate(
        str(tmp_path / "x"), Case(2, 4, 2, 32, "20,5", alibi=True, window=7, sparse=sparse, cache_type="float8_e5m2")
    )
    shown = flashcli("inspect", tmp_path / "x").out.splitlines()[-1]
    assert shown == (
        "queries: float16, scale 0.1767767, ALiBi, a window of 7, block-sparse (vert_stride 3, block_size 16, "
        "local_blocks 1, head_sliding_step -1, tp_rank 0), k_scale 0.5, v_scale 0.25"
    )
    record = json.loads(flashcli("inspect", tmp_path / "x", "--json", "-").out)
    assert record["block_sparse"]["vert_stride"] == 3 and record["alibi"] and record["sliding_window"] == 7


def test_names_of_any_length_are_not_told_at_length(whole, tmp_path):
    told: list[str] = []
    long = {"x" * 10**5: np.zeros(1, np.float32)}
    read_decode(saved(tmp_path / "long.safetensors", contents(whole) | long, {"y" * 10**5: "1"}), told.append)
    code = (tmp_path / "long.safetensors").read_bytes().replace(b'"F32"', b'"' + b"F" * 10**5 + b'"', 1)
    size = struct.unpack_from("<Q", code)[0] + 10**5 - 3
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", size) + code[8:])
    with pytest.raises(BadInput, match="is not a whole") as caught:
        read_decode(tmp_path / "odd.safetensors")
    assert len(told) == 2 and max(map(len, [*told, str(caught.value)])) < 400


def test_a_number_of_metadata_that_is_none_is_not_told_at_length(whole, tmp_path):
    with pytest.raises(BadInput) as caught:
        read_decode(saved(tmp_path / "wrong.safetensors", contents(whole), {"tp_rank": "9" * 5000}))
    assert "tp_rank = '9999" in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "metadata",
    [{"layout": "hdn"}, {"scale": "big"}, {"scale": "nan"}, {"sliding_window": "-1"}, {"vert_stride": "2.5"}],
    ids=str,
)
def test_metadata_that_makes_no_sense_is_refused(whole, tmp_path, metadata):
    with pytest.raises(BadInput, match=f"{next(iter(metadata)).removeprefix('sliding_')}"):
        read_decode(saved(tmp_path / "wrong.safetensors", contents(whole), metadata))


@given(st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    generate(folder / "cut", SMALL)
    code = (folder / "cut").read_bytes()
    (folder / "cut").write_bytes(code[: data.draw(st.integers(0, len(code) - 1))])
    with pytest.raises(BadInput, match="not a whole"):
        read_decode(folder / "cut")


@given(st.data())
def test_a_header_with_a_wrong_byte_is_read_or_refused_but_breaks_nothing(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    generate(folder / "odd", SMALL)
    code = bytearray((folder / "odd").read_bytes())
    header = 8 + struct.unpack_from("<Q", code)[0]
    code[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (folder / "odd").write_bytes(code)
    try:
        read_decode(folder / "odd")
    except BadInput as error:
        assert "odd" in str(error)


FOREIGN = {"empty": b"", "text": b"# a text\n" * 40, "zeros": bytes(4096), "picture": b"\x89PNG\r\n\x1a\n" + bytes(99)}


@pytest.mark.parametrize("code", FOREIGN.values(), ids=list(FOREIGN))
def test_foreign_files_are_not_taken_for_tensors(tmp_path, code):
    (tmp_path / "x").write_bytes(code)
    assert not has_tensors(tmp_path / "x")
    with pytest.raises(BadInput, match="not a whole"):
        read_decode(tmp_path / "x")


@pytest.mark.parametrize("code", FOREIGN.values(), ids=list(FOREIGN))
def test_files_that_only_have_the_name_are_told_what_such_a_file_is(tmp_path, code):
    (path := tmp_path / "x.safetensors").write_bytes(code)
    for command in (["inspect", path], ["compare", path, path]):
        flashcli(*command).assert_error(65, "not a whole .safetensors file")


def test_an_input_of_attention_is_not_taken_for_tensors(tmp_path):
    assert not has_tensors(write_input(tmp_path / "x.in", np.zeros((1, 3, 4, 123), np.float32)))


@pytest.mark.parametrize("first", [0.0, 0.5, 1e-30, 3e38])
def test_an_output_of_attention_is_not_taken_for_tensors(tmp_path, first):
    """Whatever its numbers are: here the bytes of the third begin as the text of a header does."""
    third = np.frombuffer(b'{"\x12?', np.float32)[0]
    np.array([first, first, third], np.float32).tofile(tmp_path / "y")
    assert not has_tensors(tmp_path / "y") and flashcli("compare", tmp_path / "y", tmp_path / "y").code == 0


@pytest.mark.parametrize("text", ["uniform:0", "skewed:0", "uniform:99999999999", "skewed:99999999999", "3x9999999999"])
def test_lengths_that_cannot_be_are_wrong_usage(tmp_path, text):
    done = flashcli("generate", tmp_path / "x", "--decode", "3,4,2,16", "--lengths", text)
    done.assert_error(2, "lengths")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--sharpness", "--value-scale"])
def test_what_is_drawn_is_finite(tmp_path, option):
    done = flashcli("generate", tmp_path / "x", "--decode", "3,4,2,16", option, "nan")
    assert done.code == 2 and "is not a finite number" in done.err


@pytest.mark.parametrize(
    "options",
    [("--value-scale", "1e4"), ("--sharpness", "1e300"), ("--type", "bfloat16", "--value-scale", "1e38"),
     ("--fp8", "e4m3", "--value-scale", "1e300"), ("--type", "float32", "--fp8", "e5m2", "--sharpness", "1e38")],
    ids=str,
)  # fmt: skip
def test_what_numbers_have_no_room_for_is_not_drawn(tmp_path, options):
    flashcli("generate", "x", "--decode", "3,4,2,16", *options, cwd=tmp_path).assert_error(
        2, "scale" if "--value-scale" in options else "sharpness"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cache", ["", "float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1000.0])
def test_values_may_be_of_any_size_that_there_is_room_for(cache, scale):
    asked = make(Case(2, 4, 2, 32, "20,5", value_scale=scale, query_type="float32", cache_type=cache))
    with DecodeCpu() as backend:
        out, _ = backend.decode(asked, range(2))
    assert np.isfinite(out).all() and abs(out).max() <= 6 * scale and (scale == 0 or abs(out).max() > scale / 3)


def test_a_file_is_made_a_part_at_a_time(tmp_path, monkeypatch):
    case = dataclasses.replace(SMALL, lengths="20000,20000", D=128)
    monkeypatch.setattr(decode_cases, "STEP", 2**14)
    tracemalloc.start()
    generate(tmp_path / "x", case)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = (tmp_path / "x").stat().st_size
    assert peak < size / 8 > 2**20
    made, read = make(case), read_decode(tmp_path / "x")[0]
    for name in ("key_cache", "value_cache"):
        assert getattr(made, name).tobytes() == getattr(read, name).tobytes()


def test_bad_input_writes_nothing_and_leaves_what_is_there(whole, tmp_path):
    tensors = contents(whole)
    tensors["seq_lens"][0] = 1000
    wrong, out = saved(tmp_path / "wrong.safetensors", tensors), tmp_path / "y"
    out.write_text("an answer of before")
    before = sorted(tmp_path.iterdir())
    flashcli("decode", wrong, out, "--backend", "cpu").assert_error(65, "1000")
    assert out.read_text() == "an answer of before" and sorted(tmp_path.iterdir()) == before


def test_decode_inspect_and_compare(whole, tmp_path):
    mine = tmp_path / "y"
    assert flashcli("decode", whole, mine, "--backend", "cpu").code == 0
    seen = json.loads(flashcli("inspect", whole, "--json", "-").out)
    assert (seen["S"], seen["H"], seen["Hkv"], seen["tokens"], seen["longest"]) == (2, 4, 2, 25, 20)
    done = flashcli("compare", mine, mine)
    assert done.code == 0 and "out: " in done.out and "lse: " in done.out
    answer = contents(mine)
    answer["lse"].flat[0] += 1
    done = flashcli("compare", saved(tmp_path / "other", answer), mine, "--json", "-")
    found = json.loads(done.out)
    assert done.code == 1 and found["out"]["matches"] and found["lse"]["mismatches"] == 1
    flashcli("compare", whole, mine).assert_error(65, "no tensor out")


def test_inspect_knows_an_answer(tmp_path):
    out = np.array([[[1.0, -2.0], [np.nan, np.inf]], [[0.0, 0.0], [3.0, 4.5]]], np.float16)
    lse = np.array([[1.5, 2.0], [-np.inf, -3.25]], np.float32)
    path = saved(tmp_path / "y", {"out": out, "lse": lse})
    assert flashcli("inspect", path).out.splitlines() == [
        "out: [2, 2, 2] of float16, -2 to 4.5", "lse: -3.25 to 2, -inf of 1 queries that see nothing", "NaN or Inf: 2"
    ]  # fmt: skip
    found = json.loads(flashcli("inspect", path, "--json", "-").out)
    assert (found["shape"], found["type"], found["nonfinite"]) == ([2, 2, 2], "float16", 2)
    nothing = saved(tmp_path / "z", {"out": out[:0], "lse": lse[:0]})
    assert flashcli("inspect", nothing).out.startswith("out: [0, 2, 2] of float16, 0 to 0\n")


def test_an_answer_may_be_compared_with_one_in_float64(tmp_path):
    out, lse = np.ones((2, 2, 8)), np.zeros((2, 2))
    mine = saved(tmp_path / "mine", {"out": out.astype(np.float16), "lse": lse.astype(np.float32)})
    theirs = saved(tmp_path / "theirs", {"out": out + 1e-5, "lse": lse})
    done = flashcli("compare", mine, theirs)
    assert done.code == 0 and "out: max abs error: 1.000e-05" in done.out.splitlines(), done.err


def with_rounded_weights(asked) -> np.ndarray:
    """An answer whose weights are rounded to the query's type before they meet the values, as fused kernels do."""
    out = np.zeros(asked.query.shape, asked.query.dtype)
    for s, t, head in np.ndindex(out.shape[:-1]):
        tokens = np.arange(asked.seq_lens[s])
        K, V = gather(asked, s, head // asked.group, tokens, np.float32)
        P = np.exp((S := K @ asked.query[s, t, head].astype(np.float32) * asked.scale) - S.max())
        out[s, t, head] = P.astype(out.dtype).astype(np.float32) @ V / P.sum()
    return out


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("lengths", ["7", "300"])
def test_what_rounding_to_a_short_type_costs_is_allowed_and_no_more(tmp_path, kind, lengths):
    asked = make(Case(4, 8, 2, 64, lengths, query_type=kind))
    golden = decode_judge.golden(asked)
    want = golden.out.astype(asked.query.dtype)
    right = {"rounded": want, "float64": golden.out, "weights": with_rounded_weights(asked)}
    swapped = np.concatenate([want[1:], want[:1]])
    wrong = {"zeros": want * 0, "mean": np.full_like(want, golden.out.mean()), "another's": swapped}

    def file(name: str, out: np.ndarray):
        return saved_answer(tmp_path / name, out, golden.lse.astype(np.float32))

    for name, out in right.items():
        assert compare_answers(file(name, out), file("want", want))["out"].matches, name
    for name, out in wrong.items():
        assert compare_answers(file(name, out), file("want", want))["out"].mismatches > want.size / 2, name
    told = flashcli("compare", tmp_path / "zeros", tmp_path / "want").out.splitlines()[0]
    unit = {"float16": "0.000976562", "bfloat16": "0.0078125"}[kind]
    assert told.endswith(f"off by more than 0.0001 + 0.0001·|want| + {unit}·(largest |want| of the row)")


def saved_answer(path, out, lse):
    with TensorWriter(path, {"out": (out.dtype.name, out.shape), "lse": ("float32", lse.shape)}, {}) as file:
        file.write("out", out)
        file.write("lse", lse)
        file.commit()
    return path


def test_places_of_an_answer_are_named_by_its_own_axes_and_errors_tell_what_they_leave_out(tmp_path):
    out, lse = np.ones((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)
    want = saved_answer(tmp_path / "want", out, lse)
    out[1, 2, 3, 5], lse[1, 0, 2] = 3, np.nan
    told = flashcli("compare", saved_answer(tmp_path / "got", out, lse), want).out
    assert "out: worst at (sequence, token, head, number) = (1, 2, 3, 5): got 3, want 1\n" in told
    assert "lse:   off at (sequence, token, head) = (1, 0, 2): got nan, want 0\n" in told
    assert told.count("these errors leave them out") == 1
    want = saved_answer(tmp_path / "want", out[:, 0], lse[:, 0])
    place = compare_answers(saved_answer(tmp_path / "got", out[:, 1], lse[:, 0]), want)["lse"].worst
    assert place is None
    found = json.loads(
        flashcli("compare", saved_answer(tmp_path / "got", out[:, 2], lse[:, 0]), want, "--json", "-").out
    )
    assert found["out"]["places"] == [{"sequence": 1, "head": 3, "number": 5, "got": 3, "want": 1}]


def test_answers_of_other_shapes_are_no_answers_to_the_same(tmp_path):
    answers = [
        saved(tmp_path / str(S), {"out": np.zeros((S, 2, 8), np.float32), "lse": np.zeros((S, 2), np.float32)})
        for S in (1, 2)
    ]
    with pytest.raises(BadInput, match=r"out has shape \(1, 2, 8\)"):
        compare_answers(*answers)
    nothing = saved(tmp_path / "0", {"out": np.zeros((2, 2, 0), np.float32), "lse": np.zeros((2, 2), np.float32)})
    with pytest.raises(BadInput, match=r"out has shape \(2, 2, 0\)"):
        compare_answers(nothing, nothing)


def test_a_kernel_is_for_gpus(whole, tmp_path):
    done = flashcli("decode", whole, tmp_path / "y", "--backend", "cpu", "--kernel", "split")
    done.assert_error(2, "--kernel is for GPUs")
    assert not (tmp_path / "y").exists()


def test_the_ladder_is_listed():
    listed = json.loads(flashcli("kernels", "--operation", "decode", "--json", "-").out)
    assert [kernel["name"] for kernel in listed] == list(KERNELS)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (("--sharpness", "nan"), "'nan' is not a finite number"),
        (("--value-scale", "inf"), "'inf' is not a finite number"),
        (("--lengths", "9" * 5000), "is no list of lengths"),
        (("--distribution", "equal"), "--decode goes with neither --shape nor --distribution"),
        (("--decode", f"{'9' * 5000},1,1,8"), "is not four numbers"),
        (("--block-sparse", "8"), "'8' is not STRIDE,SIZE[,LOCAL[,STEP[,RANK]]], such as 8,64,16,1."),
        (("--block-sparse", "2,24"), "block-sparse block_size is 24, no multiple of the page's 16"),
        (("--block-sparse=-2,16",), "vert_stride is -2, not from 2 to"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_generate_refuses_what_would_make_another_file_than_asked_for(tmp_path, option, complaint):
    done = flashcli("generate", tmp_path / "x", "--decode", "2,4,2,32", "--lengths", "5", *option)
    assert (done.code, complaint in done.err) == (2, True) and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "where", "told"),
    [
        ("query", (1, 2, 3), "first nan in query at (sequence, token, head, number) = (1, 0, 2, 3); IEEE rules apply."),
        (
            "value_cache",
            (2, 1, 5, 6),
            "first nan in value_cache at (sequence, token, head, number) = (0, 6, 1, 5); IEEE",
        ),
    ],
)
def test_decode_warns_of_what_is_not_finite(whole, tmp_path, name, where, told):
    tensors = contents(whole)
    tensors["block_tables"][0, 0] = 2
    tensors["value_cache"][2] = 0
    tensors[name][where] = np.nan
    done = flashcli("decode", saved(tmp_path / "x", tensors), tmp_path / "y", "--backend", "cpu")
    assert done.code == 0 and done.err.count("Warning: ") == 1 and told in done.err


def test_decode_warns_of_an_answer_that_its_type_has_no_room_for(tmp_path):
    done = flashcli("decode", with_factor(tmp_path / "x", "v_scale", 1e9), tmp_path / "y", "--backend", "cpu")
    assert done.code == 0 and "first inf in out at" in done.err.replace("-inf", "inf")
    assert "though all it sees is: float16 has no room for its scores or sums." in done.err


def test_the_reference_is_the_float64_answer_in_the_query_s_type(tmp_path):
    arguments = ["--decode", "3,4,2,32", "--lengths", "20,5,0", "--type", "bfloat16"]
    assert flashcli("generate", "x", *arguments, "--reference", "ref", cwd=tmp_path).code == 0
    reference, golden = Tensors(tmp_path / "ref"), decode_judge.golden(read_decode(tmp_path / "x")[0])
    np.testing.assert_array_equal(reference["out"], golden.out[:, 0].astype(dtype("bfloat16")))
    np.testing.assert_array_equal(reference["lse"], golden.lse[:, 0].astype(np.float32))
    assert flashcli("decode", "x", "y", "--backend", "cpu", cwd=tmp_path).code == 0
    assert flashcli("compare", "y", "ref", cwd=tmp_path).code == 0


def test_a_reference_that_cannot_be_written_or_computed_leaves_no_input(tmp_path):
    arguments = ["--decode", "1,4,2,32", "--lengths", "5", "--reference"]
    flashcli("generate", "x", *arguments, "no/ref", cwd=tmp_path).assert_error(73, "no/ref")
    flashcli("generate", "-", *arguments, "ref", cwd=tmp_path).assert_error(2, "computed from OUT")
    assert not [*tmp_path.iterdir()]


SHORTENED = """
import os, sys
import flashcli.cpu.decode as decode
from flashcli.cli import main

def gather(*args, whole=decode.gather):
    os.truncate(sys.argv[2], int(os.environ["LEFT"]))
    return whole(*args)

decode.gather = gather
sys.exit(main())
"""


@pytest.mark.parametrize("left", [4096, -1], ids=["what is read", "what is not"])
def test_a_file_that_is_cut_short_meanwhile_is_bad_input_and_nothing_is_left(tmp_path, left):
    path = tmp_path / "x"
    generate(str(path), dataclasses.replace(SMALL, lengths="2000,30"))
    changes = environment(LEFT=str(left % path.stat().st_size))
    line = [sys.executable, "-c", SHORTENED, "decode", path, tmp_path / "y", "--backend", "cpu", "--threads", "2"]
    done = subprocess.run(line, env=changes, capture_output=True, text=True, timeout=60)
    told = f"Error: '{path}' became shorter while it was read.\nHint: do not change it meanwhile.\n"
    assert (done.returncode, done.stderr, [*tmp_path.iterdir()]) == (65, told, [path])


def test_a_file_for_another_command_is_told_which_one(whole, tmp_path):
    run = write_input(tmp_path / "x.in", np.zeros((2, 3, 4, 8), np.float32))
    for command, path, hint in (
        ("run", whole, "it is a .safetensors file: use `flashcli decode`."),
        ("decode", run, "it is an input of (B, N, d): use `flashcli run`."),
    ):
        (done := flashcli(command, path, tmp_path / "y")).assert_error(65, path.name)
        assert f"Hint: {hint}\n" in done.err
    (tmp_path / "z").write_bytes(b"\xff" * 64)
    (done := flashcli("inspect", tmp_path / "z")).assert_error(65, "not an input file")
    assert "An output has no header: `flashcli inspect FILE --shape B,N,d`" in done.err


def test_hints_say_what_works(tmp_path):
    def hint(*arguments: str) -> str:
        done = flashcli("generate", tmp_path / "x", "--decode", *arguments)
        assert done.code == 2
        return done.err

    assert "not a multiple of 8" in hint("2,4,2,60") and "nhd" not in hint("2,4,2,60")
    assert "choose nhd or hnd" in hint("2,4,2,24", "--fp8", "e5m2")
    assert "255 sequences of 64 tokens" in hint("256,4,2,64", "--lengths", "131072,255x64")
    whole = tmp_path / "x"
    generate(str(whole), Case(2, 4, 2, 32, "20,5", page=8, layout="nhd"))
    named = saved(tmp_path / "y", contents(whole), {"layout": "hnd"})
    flashcli("decode", named, tmp_path / "z").assert_error(65, "no multiple of the cache's 8 (layout hnd)")


def test_ragged_queries_softcaps_and_sinks_go_from_file_to_file(tmp_path):
    path, right, out = (str(tmp_path / name) for name in ("x", "right", "out"))
    shape = ["--decode", "4,4,2,32", "--lengths", "30,5,0,70", "--queries", "1x2,0,40", "--softcap", "3", "--sinks"]
    made = flashcli("generate", path, *shape, "--reference", right)
    told = f"{path}: (S, H, Hkv, D) = (4, 4, 2, 32), 42 query tokens, 105 tokens"
    assert made.code == 0 and made.out.startswith(told), made.err
    assert "a softcap of 3, sinks" in flashcli("inspect", path).out
    assert flashcli("decode", path, out, "--backend", "cpu").code == 0
    same = flashcli("compare", out, right)
    assert same.code == 0 and "worst at (token, head, number)" in same.out
    asked, shape = read_decode(path)
    assert (shape, asked.softcap, asked.query_starts.tolist()) == ((42, 4, 32), 3.0, [0, 1, 2, 2, 42])
    with DecodeCpu() as backend:
        parts = [backend.decode(asked, range(s, s + 1))[0] for s in range(4)]
    assert np.concatenate(parts).tobytes() == Tensors(out)["out"].tobytes()


def test_query_tokens_that_all_see_their_whole_sequence_go_from_file_to_file(tmp_path):
    path, right, out = (str(tmp_path / name) for name in ("x", "right", "out"))
    shape = ["--decode", "2,4,2,32", "--lengths", "30,5", "--queries", "3,5"]
    assert flashcli("generate", path, *shape, "--no-causal", "--reference", right).code == 0
    assert "no causal mask" in flashcli("inspect", path).out and not read_decode(path)[0].causal
    assert flashcli("decode", path, out, "--backend", "cpu").code == 0
    assert flashcli("compare", out, right).code == 0
    masked = str(tmp_path / "masked")
    assert flashcli("generate", masked, *shape).code == 0 and "no causal mask" not in flashcli("inspect", masked).out
    same_number = [*shape[:4], "--query-tokens", "3", "--no-causal"]
    flashcli("generate", tmp_path / "y", *same_number).assert_error(2, "causal is False, which goes with query_starts")


def test_the_largest_query_length_stands_in_the_metadata(tmp_path):
    whole = tmp_path / "x"
    generate(str(whole), Case(2, 4, 2, 32, "20,5", page=8, queries="1,4"))
    said = saved(tmp_path / "y", contents(whole), {"max_query_len": "4"})
    asked, _ = read_decode(said)
    assert asked.max_query_len == 4 and decode_tensors.metadata(asked)["max_query_len"] == "4"
    wrong = saved(tmp_path / "z", contents(whole), {"max_query_len": "3"})
    flashcli("decode", wrong, tmp_path / "out").assert_error(65, "sequence 1 4 query tokens, more than max_query_len")


def test_a_ragged_file_says_what_is_wrong_with_it(tmp_path):
    asked = make(dataclasses.replace(SMALL, S=3, lengths="20,5,9", queries="1x3"))
    done = flashcli("generate", tmp_path / "x", "--decode", "2,4,2,32", "--queries", "1x2", "--query-tokens", "2")
    assert (done.code, done.err.splitlines()[1]) == (2, "Hint: leave out one of them.")
    broken = dataclasses.replace(asked, query_starts=np.int32([0, 2, 1, 3]))
    assert decode_problem(broken) == "query_starts[2] is 1, below 2 before it"
