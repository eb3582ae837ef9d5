"""Paged decode of PyTorch's tensors: on the CPU, on a GPU, and on a driver that is a fake, for which the CPU's memory
is a GPU's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses import FakeTensorMode  # noqa: E402

import flashcli  # noqa: E402
from flashcli.asked.decode import ARRAYS, LAYOUTS, BlockSparse  # noqa: E402
from flashcli.cpu.decode import DecodeCpu  # noqa: E402
from flashcli.cpu.pages import DecodeArrays  # noqa: E402
from flashcli.errors import KernelFailure, UsageError  # noqa: E402
from flashcli.files.decode.cases import Case, make  # noqa: E402
from flashcli.gpu import place as launcher  # noqa: E402
from flashcli.kernels import decode  # noqa: E402
from flashcli.kernels.tuning.decode import (  # noqa: E402
    AHEAD_OF_LENGTH,
    BY_LENGTHS,
    HAS_CLUSTERS,
    PIECE_AFTER_PIECE,
    Tuning,
)
from flashcli.torch import in_place, paged, private  # noqa: E402

SMALL = Case(3, 4, 2, 64, "5,37,0", page=8)
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TYPES = [
    ("float32", ""), ("float16", ""), ("bfloat16", ""), ("float32", "float8_e4m3fn"), ("float16", "float8_e5m2"),
    ("bfloat16", "float8_e4m3fn"), ("float16", "int8"),
]  # fmt: skip


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = torch.from_numpy(array.view({1: np.uint8, 2: np.int16}[array.itemsize]))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def arrays(asked: DecodeArrays) -> dict[str, torch.Tensor]:
    found = {name: getattr(asked, name) for name in ARRAYS}
    if asked.is_ragged:
        found["query"] = asked.query[:, 0]
    return {name: tensor(array) for name, array in found.items() if array is not None}


def options(asked: DecodeArrays) -> dict[str, object]:
    same = {name: getattr(asked, name) for name in ("k_scale", "v_scale", "layout", "scale", "softcap", "causal")}
    return {**same, "sliding_window": asked.window, "block_sparse": asked.sparse}


def right(asked: DecodeArrays) -> tuple[torch.Tensor, torch.Tensor]:
    with DecodeCpu(1) as backend:
        out, lse = backend.decode(asked, range(asked.S))
    return tensor(out), tensor(lse)


def check(got, asked: DecodeArrays) -> None:
    want, want_lse = right(asked)
    assert got[0].dtype == want.dtype and got[0].is_contiguous() and want.any()
    bound = ERROR[want.dtype] * max(1.0, float(want.abs().max()))  # products are of rounded weights
    torch.testing.assert_close(got[0].cpu().double(), want.double(), rtol=0, atol=bound)
    torch.testing.assert_close(got[1].cpu(), want_lse, rtol=1e-3, atol=1e-3)


# on the CPU


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_tensors_on_the_cpu_give_numpys_answer(types):
    asked = make(dataclasses.replace(SMALL, query_type=types[0], cache_type=types[1]))
    check(flashcli.decode(**arrays(asked), **options(asked), return_lse=True, backend="cpu"), asked)


def test_bytes_may_be_fp8_if_the_caller_says_so():
    asked = make(dataclasses.replace(SMALL, cache_type="float8_e5m2"))
    given = arrays(asked)
    given |= {name: given[name].view(torch.uint8) for name in ("key_cache", "value_cache")}
    out = flashcli.decode(**given, **options(asked), cache_dtype="float8_e5m2", backend="cpu")
    assert torch.equal(out, right(asked)[0])
    numbers = {name: x.numpy() for name, x in given.items()}
    out = flashcli.decode(**numbers, **options(asked), cache_dtype="float8_e5m2", backend="cpu")
    np.testing.assert_array_equal(out, right(asked)[0].numpy())


def test_what_is_mixed_or_wants_gradients_is_refused():
    given = arrays(make(SMALL))
    with pytest.raises(TypeError, match="seq_lens must be a PyTorch tensor, as query is, not list"):
        flashcli.decode(**given | {"seq_lens": [5, 37, 0]})
    with pytest.raises(ValueError, match="key_cache must be on cpu, as query is, not on meta"):
        flashcli.decode(**given | {"key_cache": given["key_cache"].to("meta")})
    nested = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged)
    with pytest.raises(TypeError, match="value_cache must be a dense tensor, not nested"):
        flashcli.decode(**given | {"value_cache": nested})
    with pytest.raises(ValueError, match="query must not be a lazily negated view"):
        flashcli.decode(**given | {"query": torch._neg_view(given["query"])})
    with pytest.raises(ValueError, match=r"query must not require gradients.*no_grad"):
        flashcli.decode(**given | {"query": given["query"].requires_grad_()})
    with torch.no_grad():
        flashcli.decode(**given, backend="cpu")


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # an error in later PyTorchs, as well
def test_tensors_without_numbers_are_refused():
    given = arrays(make(SMALL))
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in given.items()}
        with pytest.raises(TypeError, match="query must be a tensor whose numbers are in memory"):
            flashcli.decode(**fake)
    query = given.pop("query")
    with pytest.raises(TypeError, match="query must be a tensor whose numbers are in memory"):
        torch.vmap(lambda x: flashcli.decode(x, **given))(query[None])


# on a driver that is a fake


@pytest.fixture
def stream(monkeypatch, driver):
    """PyTorch's current stream: a list of its one number. The GPU has fp8."""
    current = [0]
    driver.capability = 9, 0
    monkeypatch.setattr(paged, "place_of_device", lambda device: launcher.place_of_device(0))
    monkeypatch.setattr(private, "current_stream", lambda device: current[0])
    monkeypatch.setattr(in_place, "_kept", type(in_place._kept)())
    monkeypatch.setattr(paged, "_ready", {})
    return current


def compute(given: dict[str, torch.Tensor], **options) -> tuple[torch.Tensor, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        return paged.decode(**given, **options, return_lse=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_every_layout_and_type_is_computed_where_it_lies(stream, layout, types):
    asked = make(dataclasses.replace(SMALL, layout=layout, query_type=types[0], cache_type=types[1]))
    asked = dataclasses.replace(asked, k_scale=0.5, v_scale=3.0) if types[1] else asked
    check(compute(arrays(asked), **options(asked)), asked)


@pytest.mark.parametrize(
    "changes",
    [
        {"T": 3}, {"T": 2, "alibi": True}, {"window": 6}, {"H": 7, "Hkv": 1}, {"page": 1}, {"S": 1, "lengths": "9"},
        {"sparse": BlockSparse(3, 8, 1, -1, 1), "lengths": "60,33,9"}, {"softcap": 2.0, "sinks": True},
        {"queries": "2,0,9", "sinks": True}, {"queries": "2,0,9", "causal": False},
    ],
    ids=str,
)  # fmt: skip
def test_everything_that_can_be_asked_for_reaches_the_kernel(stream, changes):
    asked = make(dataclasses.replace(SMALL, **changes))
    for _ in range(2):  # the second time it is remembered, and its scratch has been used
        check(compute(arrays(asked), **options(asked)), asked)


def test_a_query_without_an_axis_of_tokens_has_an_answer_without_one(stream):
    asked = make(SMALL)
    given = arrays(asked)
    out, lse = compute(given | {"query": given["query"][:, 0]}, **options(asked))
    assert out.shape == (3, 4, 64) and lse.shape == (3, 4)
    check((out[:, None], lse[:, None]), asked)


def test_a_slice_of_a_fused_projection_and_a_shared_cache_are_read_by_their_strides(stream):
    asked = make(dataclasses.replace(SMALL, layout="nhd", T=2))
    given = arrays(asked)
    fused = torch.full((3, 2, 9, 64), torch.nan, dtype=torch.float16)
    fused[:, :, 2:6] = given["query"]
    both = torch.stack([given["key_cache"], given["value_cache"]], 1)  # [pages, 2, page, Hkv, D], as vLLM keeps them
    given |= {"query": fused[:, :, 2:6], "key_cache": both[:, 0], "value_cache": both[:, 1]}
    check(compute(given, **options(asked)), asked)


def test_pages_and_heads_of_vllms_layout_may_be_any_distance_apart(stream):
    asked = make(SMALL)
    given = arrays(asked)
    for name in ("key_cache", "value_cache"):
        x = given[name]
        apart = torch.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), torch.nan, dtype=x.dtype)
        apart[:, ::2] = x
        given[name] = apart[:, ::2]
    check(compute(given, **options(asked)), asked)


def test_a_part_of_the_tables_is_read_where_it_is(stream, monkeypatch):
    asked = make(SMALL)
    given = arrays(asked)
    wide = torch.full((3, 900), -1, dtype=torch.int32)
    wide[:, : given["block_tables"].shape[1]] = given["block_tables"]
    for width in (given["block_tables"].shape[1], 20):
        check(compute(given | {"block_tables": wide[:, :width]}, **options(asked)), asked)
        check(flashcli.decode(**given | {"block_tables": wide[:, :width]}, return_lse=True, backend="cpu"), asked)


DRAWN, ONE_EACH = Tuning(finds=PIECE_AFTER_PIECE), Tuning(finds=BY_LENGTHS)
MERGED_BY_CLUSTERS = Tuning(finds=AHEAD_OF_LENGTH, cluster=4)


@pytest.mark.parametrize(("current", "capability"), [(0, (9, 0)), (7, (12, 0)), (7, (8, 9))])
@pytest.mark.parametrize(
    ("tuning", "launches", "without_clusters"),
    [
        (DRAWN, ["begin", "tensor", "merge"], ["begin", "tensor", "merge"]),
        (ONE_EACH, ["tensor", "merge"], ["tensor", "merge"]),
        (MERGED_BY_CLUSTERS, ["tensor"], ["tensor", "merge"]),
    ],
    ids=["drawn", "one each", "merged by clusters"],
)
def test_every_launch_is_on_the_stream_and_those_after_the_first_may_begin_early_where_kernels_wait(
    stream, driver, monkeypatch, current, capability, tuning, launches, without_clusters
):
    stream[0], driver.capability = current, capability
    own = decode.KERNELS["tensor"]
    tensor = dataclasses.replace(own, fitted=lambda problem: own.fitted(problem)._replace(tuning=tuning))
    monkeypatch.setitem(decode.KERNELS, "tensor", tensor)
    asked = make(dataclasses.replace(SMALL, lengths="40,1500,3"))
    for _ in range(2):  # in the same scratch, where numbers of pieces have been drawn
        check(compute(arrays(asked), **options(asked)), asked)
    launches = launches if capability >= HAS_CLUSTERS else without_clusters
    assert [one[:2] for one in driver.launches] == [(name, current) for name in launches] * 2
    assert driver.early == ([False] + [capability >= (9, 0)] * (len(launches) - 1)) * 2


@pytest.mark.parametrize(
    ("kernel", "launches"),
    [("paged_v1", ["paged_v1"]), ("paged_v2", ["paged_v2", "reduce"]), ("grouped", ["grouped", "merge"])],
)
def test_a_rung_computes_where_it_is_named(stream, driver, kernel, launches):
    given = arrays(make(SMALL))
    compute(given)
    driver.launches.clear()
    compute(given, kernel=kernel)
    assert [name for name, *_ in driver.launches] == launches


def test_a_kernel_that_cannot_be_is_told(stream, driver):
    given = arrays(make(dataclasses.replace(SMALL, query_type="float32")))
    with pytest.raises(UsageError, match="there is no kernel 'mma' for paged decode"):
        compute(given, kernel="mma")
    with pytest.raises(UsageError, match="kernel tensor cannot compute this: tensor cores have no float32"):
        compute(given, kernel="tensor")
    with pytest.raises(TypeError, match="kernel must be the name of a kernel, not list"):
        compute(given, kernel=["grouped"])
    with pytest.raises(UsageError, match="kernel is for GPUs, not for the cpu backend"):
        flashcli.decode(**given, backend="cpu", kernel="grouped")
    assert not driver.launches


def test_scales_may_be_tensors(stream):
    asked = make(dataclasses.replace(SMALL, cache_type="float8_e4m3fn"))
    asked = dataclasses.replace(asked, k_scale=0.5, v_scale=3.0)
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([3.0])}
    check(compute(arrays(asked) | scales, scale=asked.scale), asked)
    with pytest.raises(ValueError, match=r"k_scale must be a number or one float32, not float32 \[2\]"):
        compute(arrays(asked) | {"k_scale": torch.ones(2)})


@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0)], ids=["a number", "a tensor"])
def test_factors_of_a_cache_that_is_not_fp8_are_ignored(stream, factor):
    asked = make(SMALL)
    check(compute(arrays(asked) | {"k_scale": factor, "v_scale": factor}, scale=asked.scale), asked)


def test_lengths_are_not_looked_at_and_out_of_range_ones_are_cut(stream, monkeypatch):
    asked = make(dataclasses.replace(SMALL, lengths="40,40,0"))
    given = arrays(asked)
    given["seq_lens"] = torch.tensor([1000, 40, -5], dtype=torch.int32)
    for name in ("item", "tolist", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits for the GPU"))
    found = compute(given, **options(asked))
    monkeypatch.undo()
    check(found, asked)


def test_nothing_is_launched_for_tensors_without_numbers(stream, driver):
    given = arrays(make(SMALL))
    compute(given)
    launched = len(driver.launches)
    for name in ("query", "seq_lens"):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(given[name])
        with pytest.raises(TypeError, match=f"{name} must be a tensor whose numbers are in memory"):
            compute(given | {name: fake})
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match="out must be a tensor whose"):
        compute(given)
    with pytest.raises(TypeError, match="query must be a tensor whose numbers are in memory"):
        torch.vmap(lambda x: compute(given | {"query": x}))(given["query"][None])
    assert len(driver.launches) == launched


def test_an_answer_has_to_start_where_kernels_write_it(stream, driver):
    given = arrays(make(SMALL))
    odd = torch.empty(given["query"].numel() + 1, dtype=given["query"].dtype)[1:].view(given["query"].shape)
    with pytest.raises(ValueError, match="out must start on a multiple of 16 bytes"):
        compute(given, out=odd)
    assert not driver.launches


def test_a_cache_in_bytes_is_fp8_if_the_caller_says_so(stream):
    asked = make(dataclasses.replace(SMALL, cache_type="float8_e4m3fn"))
    given = arrays(asked)
    given |= {name: given[name].view(torch.uint8) for name in ("key_cache", "value_cache")}
    check(compute(given, **options(asked), cache_dtype="float8_e4m3fn"), asked)
    for wrong, words in (("int4", "cache_dtype must be one of"), (None, "key_cache is uint8: say by cache_dtype")):
        with pytest.raises(ValueError, match=words):
            compute(given, cache_dtype=wrong)
    with pytest.raises(ValueError, match="cache_dtype is for caches of uint8, not for float16 and float16"):
        compute(arrays(make(SMALL)), cache_dtype="float8_e5m2")


def by_two(x):
    return torch.cat([x, x], -1)[..., ::2]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("seq_lens", lambda x: x.long(), "seq_lens is int64, not int32"),
        ("block_tables", by_two, r"block_tables has strides .*, where \['any', 1\] are wanted"),
        ("query", lambda x: x.double(), "query is float64"),
        ("query", by_two, "query has strides"),
        ("query", lambda x: torch.zeros(x.numel() + 1).half()[1:].view(x.shape), "start on multiples of 16 bytes"),
        ("key_cache", lambda x: x.mT.contiguous().mT, "key_cache has strides"),
        ("value_cache", lambda x: x[0], "value_cache has shape"),
        ("alibi_slopes", lambda _: torch.ones(3), "alibi_slopes has shape"),
    ],
)  # fmt: skip
def test_what_no_kernel_reads_is_refused_before_anything_is_queued(stream, driver, name, change, words):
    given = arrays(make(SMALL))
    given[name] = change(given.get(name))
    with pytest.raises(ValueError, match=words):
        compute(given)
    assert not driver.launches


def test_rows_of_the_cache_that_are_not_aligned_are_refused(stream):
    given = arrays(make(dataclasses.replace(SMALL, layout="hnd")))
    wider = torch.zeros(*given["key_cache"].shape[:-1], 65, dtype=torch.float16)
    with pytest.raises(ValueError, match="key_cache has rows 130 bytes apart, no multiple of 16"):
        compute(given | {"key_cache": wider[..., :64]}, layout="hnd")


def test_an_old_gpu_reads_fp8_too_and_a_failing_one_says_so(stream, driver):
    asked = make(dataclasses.replace(SMALL, cache_type="float8_e4m3fn"))
    driver.fails["launch"] = 700
    with pytest.raises(KernelFailure, match="kernel tensor failed on GPU 0: fake failure 700"):
        compute(arrays(asked))
    driver.fails.clear()
    driver.capability = 7, 5
    launcher._primary.clear()
    paged._ready.clear()
    compute(arrays(asked))
    assert [name for name, *_ in driver.launches] == ["grouped", "merge"]


# on a GPU


@pytest.fixture
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")


def to_gpu(asked: DecodeArrays) -> dict[str, torch.Tensor]:
    return {name: x.cuda() for name, x in arrays(asked).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_a_gpu_gives_the_answer_of_the_cpu(on_gpu, layout, types):
    case = dataclasses.replace(SMALL, lengths="5,3000,0", layout=layout, query_type=types[0], cache_type=types[1])
    asked = make(case)
    asked = dataclasses.replace(asked, k_scale=0.5, v_scale=3.0) if types[1] else asked
    check(flashcli.decode(**to_gpu(asked), **options(asked), return_lse=True), asked)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [name for name in decode.KERNELS if name != "gather"])  # of ragged queries only
def test_each_rung_that_is_named_gives_the_answer_of_the_cpu(on_gpu, kernel):
    asked = make(dataclasses.replace(SMALL, lengths="5,3000,0"))
    check(flashcli.decode(**to_gpu(asked), **options(asked), return_lse=True, kernel=kernel), asked)


@pytest.mark.gpu
@pytest.mark.parametrize("query_type", ["float16", "float32"])
def test_lengths_that_cannot_be_are_cut_on_a_gpu_and_pages_that_there_are_not_spoil_no_other_answer(on_gpu, query_type):
    asked = make(dataclasses.replace(SMALL, lengths="40,40,0", query_type=query_type))
    given = to_gpu(asked)
    given["seq_lens"] = torch.tensor([2**31 - 1, 40, -(2**31)], dtype=torch.int32).cuda()
    check(flashcli.decode(**given, **options(asked), return_lse=True), asked)
    given["block_tables"][0] = torch.tensor([2**31 - 1, -1, asked.pages, -(2**31), 10**9])
    out, lse = (x.cpu() for x in flashcli.decode(**given, **options(asked), return_lse=True))
    want, want_lse = right(asked)
    torch.testing.assert_close(out[1:], want[1:], rtol=0, atol=2e-2)
    torch.testing.assert_close(lse[1:], want_lse[1:], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_a_compiled_function_has_a_break_at_it(on_gpu):
    given = {name: x.cuda() for name, x in arrays(make(SMALL)).items()}
    compiled = torch.compile(lambda query: flashcli.decode(query * 2, **rest) + 1, backend="aot_eager")
    query, rest = given["query"], {name: x for name, x in given.items() if name != "query"}
    for _ in range(2):
        assert torch.equal(compiled(query), flashcli.decode(query * 2, **rest) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("query_type", ["float16", "float32"])
def test_a_graph_is_replayed_with_other_lengths(on_gpu, query_type):
    long, short = (
        make(dataclasses.replace(SMALL, lengths=lengths, query_type=query_type)) for lengths in ("4000,3000,7", "9,0,1")
    )
    given = to_gpu(long)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing has been compiled and loaded
        found = flashcli.decode(**given, return_lse=True)
    for lengths in (long.seq_lens, short.seq_lens, long.seq_lens):
        given["seq_lens"].copy_(tensor(lengths))
        graph.replay()
        check(found, dataclasses.replace(long, seq_lens=lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("S", [3, 150])  # a block a piece, and piece after piece
def test_calls_behind_one_another_have_the_same_scratch_and_none_sees_numbers_of_another(on_gpu, S):
    some, others = (make(dataclasses.replace(SMALL, S=S, lengths=f"1500x{S}", seed=seed)) for seed in (0, 1))
    given, other = to_gpu(some), to_gpu(others)["query"]
    queries = [given.pop("query"), other] * 10
    found = [flashcli.decode(query, **given, return_lse=True) for query in queries]
    check(found[0], some)
    assert not torch.equal(found[0][0], found[1][0])
    for i, (out, lse) in enumerate(found):
        assert torch.equal(out, found[i % 2][0]) and torch.equal(lse, found[i % 2][1])


@pytest.mark.gpu
@pytest.mark.parametrize("S", [8, 100])  # a block a piece, and piece after piece
def test_what_comes_after_a_call_finds_its_answer_though_there_was_nothing_to_merge(on_gpu, S):
    asked = make(dataclasses.replace(SMALL, S=S, H=16, Hkv=8, lengths=f"1000x{S}"))
    given = to_gpu(asked)
    pages = given["block_tables"]
    wide = torch.cat([pages, torch.full_like(pages, -1).repeat(1, 3)], dim=1)
    want = flashcli.decode(**given)
    for _ in range(5):
        out = flashcli.decode(**given | {"block_tables": wide})
        soon = out.clone()
        out.fill_(7)  # to be found by who is too early for the next answer, which gets this memory
        del out
        assert torch.equal(soon, want)


@pytest.mark.gpu
def test_calls_on_two_streams_do_not_share_their_scratch_and_wait_for_nothing(on_gpu):
    asked = make(dataclasses.replace(SMALL, lengths="4000,3000,7"))
    given = to_gpu(asked)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(2):  # the second time nothing is compiled, and PyTorch has the memory
        found = []
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000_000)
                found += [flashcli.decode(**given, return_lse=True) for _ in range(5)]
    assert not any(stream.query() for stream in streams)
    torch.cuda.synchronize()
    for one in found:
        check(one, asked)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_are_merged_on_the_cpu_as_numpys_arrays_are(kind):
    outs, lses = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0)).to(kind), torch.zeros(2, 3, 4)
    out, lse = flashcli.merge(list(outs), list(lses))
    assert out.dtype == kind and torch.allclose(lse, torch.full((3, 4), float(np.log(2))))
    torch.testing.assert_close(out, outs.float().mean(0).to(kind), rtol=1e-2, atol=1e-2)
    with pytest.raises(TypeError, match=r"lses\[1\] must be a PyTorch tensor"):
        flashcli.merge(list(outs), [lses[0], lses[1].numpy()])
    with pytest.raises(ValueError, match=r"outs\[0\] must not require gradients"):
        flashcli.merge([outs[0].float().requires_grad_()], [lses[0]])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_parts_are_merged_on_a_gpu(on_gpu, kind):
    outs, lses = torch.randn(3, 50, 4, 128, device="cuda").to(kind), torch.randn(3, 50, 4, device="cuda")
    lses[1, 7], outs[1, 7] = -torch.inf, torch.nan
    out, lse = flashcli.merge(list(outs), list(lses))
    weights = torch.softmax(lses.double(), 0)[..., None]
    want = torch.where(weights == 0, 0, weights * outs.double()).sum(0)
    torch.testing.assert_close(out, want.to(kind), rtol=1e-2 if kind != torch.float32 else 1e-5, atol=1e-5)
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("query_type", ["float16", "float32"])
def test_a_graph_serves_steps_of_other_sequences_and_fewer_tokens(on_gpu, query_type):
    big = make(dataclasses.replace(SMALL, lengths="33,37,20", queries="5,8,3", query_type=query_type, layout="nhd"))
    static = to_gpu(big)
    given = options(big) | {"return_lse": True}
    flashcli.decode(**static, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashcli.decode(**static, **given)
    graph.replay()
    check((out, lse), big)
    small = dataclasses.replace(
        big,
        query=big.query[:7],
        seq_lens=np.array([30, 1, 20], np.int32),
        query_starts=np.array([0, 4, 4, 7], np.int32),
    )
    for name in ("seq_lens", "query_starts"):
        static[name].copy_(torch.from_numpy(getattr(small, name)))
    graph.replay()
    check((out[:7], lse[:7]), small)
    assert not out[7:].any() and torch.isneginf(lse[7:]).all()
