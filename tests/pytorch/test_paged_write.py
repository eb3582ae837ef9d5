"""Writing PyTorch's tensors into a cache in pages, and vLLM's operators.

On the CPU, on a GPU, and on a driver that is a fake, for which the CPU's memory is a GPU's.
"""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
from support import python

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses import FakeTensorMode  # noqa: E402

import flashcli  # noqa: E402
import flashcli.torch  # noqa: E402
from flashcli.asked.decode import (  # noqa: E402
    LAYOUTS,
    cache_shapes,
)
from flashcli.gpu import place as launcher  # noqa: E402
from flashcli.torch import paged_tensors, paged_write, private, vllm  # noqa: E402

HEADS, D, PAGE, PAGES = 2, 64, 8, 5
SLOTS = [5, -1, 39, 8, 0]
TYPES = [
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float8_e4m3fn"),
    ("float16", "float8_e5m2"), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e4m3fn"),
    ("bfloat16", "int8"),
]  # fmt: skip
every_type = pytest.mark.parametrize("types", TYPES, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def tensors(types: tuple[str, str], layout: str, heads: int = HEADS, head: int = D) -> dict[str, torch.Tensor]:
    kind, cache = (getattr(torch, name) for name in types)
    drawn = 100 * torch.randn(2, len(SLOTS), heads, head, generator=torch.Generator().manual_seed(0))
    shapes = cache_shapes(layout, PAGES, heads, PAGE, head, cache.itemsize)
    made = (torch.full(shape, 7.0).to(cache) for shape in shapes)
    return dict(zip(("key", "value", "key_cache", "value_cache"), (*drawn.to(kind), *made), strict=True)) | {
        "slot_mapping": torch.tensor(SLOTS)
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def right(given: dict[str, torch.Tensor], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches as NumPy's way leaves copies of them, in bytes."""
    copies = {name: x.cpu().clone() for name, x in given.items()}
    flashcli.write_kv(**copies, **options)
    return bits(copies["key_cache"]), bits(copies["value_cache"])


def check(given: dict[str, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(bits(given["key_cache"]), want[0]) and torch.equal(bits(given["value_cache"]), want[1])


# on the CPU


@every_layout
@every_type
def test_tensors_on_the_cpu_are_written_as_numpys_arrays_are(types, layout):
    given = tensors(types, layout)
    arrays = {name: paged_tensors.numbers(x.clone()) for name, x in given.items()}
    flashcli.write_kv(**arrays, layout=layout, k_scale=0.5)
    flashcli.write_kv(**given, layout=layout, k_scale=torch.tensor(0.5))
    for name in ("key_cache", "value_cache"):
        assert (bits(given[name]).numpy() == arrays[name].view(np.uint8)).all()
    assert not torch.equal(bits(given["key_cache"]), bits(tensors(types, layout)["key_cache"]))


def test_what_is_mixed_is_refused():
    given = tensors(TYPES[0], "nhd")
    with pytest.raises(TypeError, match="slot_mapping must be a PyTorch tensor, as key is, not list"):
        flashcli.write_kv(**given | {"slot_mapping": SLOTS}, layout="nhd")
    with pytest.raises(ValueError, match="value must not require gradients"):
        flashcli.write_kv(**given | {"value": given["value"].requires_grad_()}, layout="nhd")
    with pytest.raises(ValueError, match="key must be on a GPU or the CPU, not on meta"):
        flashcli.write_kv(**given | {"key": given["key"].to("meta")}, layout="nhd")
    with FakeTensorMode() as mode, pytest.raises(TypeError, match="key must be a tensor whose numbers are in memory"):
        flashcli.write_kv(**{name: mode.from_tensor(x) for name, x in given.items()}, layout="nhd")


# on a driver that is a fake


@pytest.fixture
def stream(monkeypatch, driver):
    """PyTorch's current stream: a list of its one number. The GPU has fp8."""
    current = [7]
    driver.capability = 9, 0
    monkeypatch.setattr(paged_write, "place_of_device", lambda device: launcher.place_of_device(0))
    monkeypatch.setattr(private, "current_stream", lambda device: current[0])
    monkeypatch.setattr(paged_write, "_ready", {})
    return current


def write(given: dict[str, torch.Tensor], **options) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        paged_write.write_kv(**given, **options)


@every_layout
@every_type
def test_every_layout_and_type_is_written_where_it_lies_on_the_callers_stream(stream, driver, types, layout):
    given = tensors(types, layout)
    want = right(given, layout=layout, k_scale=0.5, v_scale=3.0)
    for scales in ({"k_scale": 0.5, "v_scale": 3.0}, {"k_scale": 0.5}):  # numbers, and one that is a tensor
        some = {name: x.clone() for name, x in given.items()}
        if "v_scale" not in scales:
            some["v_scale"] = torch.tensor([3.0])
        write(some, layout=layout, **scales)
        check(some, want)
    assert driver.launches == [("write_kv", 7, 1000)] * 2


def test_slices_of_a_fused_projection_and_of_a_shared_cache_are_taken_by_their_strides(stream):
    given = tensors(TYPES[1], "nhd")
    want = right(given, layout="nhd")
    fused = torch.full((len(SLOTS), 3, HEADS, D), torch.nan, dtype=torch.float16)
    fused[:, 1], fused[:, 2] = given["key"], given["value"]
    both = torch.full((PAGES, 2, PAGE, HEADS, D), 7.0, dtype=torch.float16)  # as vLLM keeps them
    caches = {"key_cache": both[:, 0], "value_cache": both[:, 1]}
    write(given | {"key": fused[:, 1], "value": fused[:, 2]} | caches, layout="nhd")
    check(caches, want)


def test_slots_are_not_looked_at_and_those_beyond_the_cache_are_left_out(stream, monkeypatch):
    given = tensors(TYPES[0], "hnd")
    want = right(given, layout="hnd")
    given["slot_mapping"] = torch.tensor([*SLOTS[:1], 2**40, *SLOTS[2:]])
    for name in ("item", "tolist", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits for the GPU"))
    write(given, layout="hnd")
    monkeypatch.undo()
    check(given, want)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("slot_mapping", lambda x: x.int(), "slot_mapping is int32, not int64"),
        ("slot_mapping", lambda x: torch.cat([x, x])[::2], "slot_mapping has strides"),
        ("key", lambda x: torch.cat([x, x], -1)[..., ::2], "key has strides"),
        ("key", lambda x: torch.zeros(x.numel() + 1).half()[1:].view(x.shape), "start on multiples of 16 bytes"),
        ("value", lambda x: torch.zeros(*x.shape[:2], 65).half()[..., :64], "value has rows 260 bytes apart"),
        ("value_cache", lambda x: torch.zeros(*x.shape[:3], 65).half()[..., :64], "value_cache has rows 260 bytes"),
    ],
)  # fmt: skip
def test_what_no_kernel_takes_is_refused_before_anything_is_queued(stream, driver, name, change, words):
    given = tensors(TYPES[1], "nhd")
    with pytest.raises(ValueError, match=words):
        write(given | {name: change(given[name])}, layout="nhd")
    assert not driver.launches


def test_nothing_is_launched_for_tensors_without_numbers(stream, driver):
    given = tensors(TYPES[1], "nhd")
    write(given, layout="nhd")
    launched = len(driver.launches)
    for name in ("key", "value_cache", "slot_mapping"):
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(given[name])
        with pytest.raises(TypeError, match=f"{name} must be a tensor whose numbers are in memory"):
            write(given | {name: fake}, layout="nhd")
    assert len(driver.launches) == launched


def test_no_token_launches_nothing_and_an_old_gpu_writes_fp8_too(stream, driver):
    given = tensors(TYPES[0], "nhd")
    for _ in range(2):  # also when it is remembered
        write(given | {name: given[name][:0] for name in ("key", "value", "slot_mapping")}, layout="nhd")
    assert not driver.launches
    driver.capability = 8, 0
    launcher._primary.clear()
    write(tensors(TYPES[4], "nhd"), layout="nhd")
    assert [name for name, *_ in driver.launches] == ["write_kv"]


# vLLM's operators


def test_vllms_operators_have_vllms_arguments():
    first = [
        "out", "query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables", "seq_lens", "block_size",
        "max_seq_len", "alibi_slopes", "kv_cache_dtype", "k_scale", "v_scale", "tp_rank", "blocksparse_local_blocks",
        "blocksparse_vert_stride", "blocksparse_block_size", "blocksparse_head_sliding_step",
    ]  # fmt: skip
    assert [*inspect.signature(vllm.paged_attention_v1).parameters] == first
    second = [first[0], "exp_sums", "max_logits", "tmp_out", *first[1:]]
    assert [*inspect.signature(vllm.paged_attention_v2).parameters] == second
    assert flashcli.torch.paged_attention_v1 is vllm.paged_attention_v1


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e5m2", "int8"])
def test_vllms_operators_write_and_read_a_cache_as_ours_do(kv_cache_dtype):
    cache = {"auto": "float16", "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(kv_cache_dtype, kv_cache_dtype)
    given = tensors(("float16", cache), "vllm")
    query, tables, lengths = torch.randn(2, 4, D).half(), torch.tensor([[1], [0]]).int(), torch.tensor([1, 1]).int()
    scales = torch.tensor(0.5), torch.tensor(2.0)
    of_ours = {name: x.clone() for name, x in given.items()}
    flashcli.write_kv(**of_ours, k_scale=0.5, v_scale=2.0)
    caches = [given[name].view(torch.uint8) if cache != "float16" else given[name]
              for name in ("key_cache", "value_cache")]  # fmt: skip
    padded = (torch.cat([given[name], given[name]]) for name in ("key", "value"))
    flashcli.torch.reshape_and_cache(*padded, *caches, given["slot_mapping"], kv_cache_dtype, *scales)
    check({"key_cache": caches[0], "value_cache": caches[1]}, [bits(of_ours[x]) for x in ("key_cache", "value_cache")])
    of_fp8 = {} if kv_cache_dtype == "auto" else {"k_scale": 0.5, "v_scale": 2.0}  # what else is written as it is
    want = flashcli.decode(query, of_ours["key_cache"], of_ours["value_cache"], tables, lengths, scale=0.3, **of_fp8)
    rest = query, *caches, HEADS, 0.3, tables, lengths, PAGE, 1, None, kv_cache_dtype, *scales
    for function, ignored in ((flashcli.torch.paged_attention_v1, 0), (flashcli.torch.paged_attention_v2, 3)):
        out = torch.empty_like(query)
        assert function(out, *[None] * ignored, *rest) is None
        assert torch.equal(out, want) and want.any()


def test_vllms_operators_refuse_what_contradicts_itself():
    given = tensors(TYPES[1], "vllm")
    query, tables, lengths = torch.randn(2, 4, D).half(), torch.tensor([[1], [0]]).int(), torch.tensor([1, 1]).int()
    nothing = torch.empty_like(query)

    def v1(out=nothing, query=query, heads=HEADS, page=PAGE, kv_cache_dtype="auto", caches=given):
        flashcli.torch.paged_attention_v1(
            out, query, caches["key_cache"], caches["value_cache"], heads, 1.0, tables, lengths, page, 1, None,
            kv_cache_dtype, 1.0, 1.0,
        )  # fmt: skip

    with pytest.raises(ValueError, match="has 2 heads and pages of 8, but num_kv_heads is 4 and block_size 8"):
        v1(heads=4)
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8"):
        v1(kv_cache_dtype="int4")
    bytes_of_int8 = {name: given[name].to(torch.int8) for name in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8', but key_cache is int8: view it as uint8"):
        v1(kv_cache_dtype="fp8", caches=bytes_of_int8)
    with pytest.raises(ValueError, match="out must have the dtype of query"):
        v1(out=query.float())
    with pytest.raises(ValueError, match="out must be contiguous"):
        v1(out=torch.cat([query, query], -1)[..., ::2])
    whole, given["value_cache"] = given["value_cache"], given["value_cache"][0]
    with pytest.raises(ValueError, match=r"value_cache has shape .* where 4 dimensions are wanted"):
        v1()
    with pytest.raises(TypeError, match="query must be a PyTorch tensor, not NoneType"):
        v1(query=None)
    given |= {"key_cache": None, "value_cache": whole}
    with pytest.raises(TypeError, match="key_cache must be a PyTorch tensor, as query is, not NoneType"):
        v1()
    with pytest.raises(TypeError, match="key must be a PyTorch tensor, not ndarray"):
        flashcli.torch.reshape_and_cache(query.numpy(), query, whole, whole, lengths, "auto", 1.0, 1.0)


# on a GPU


@pytest.fixture
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")


@pytest.mark.gpu
@every_layout
@every_type
def test_a_gpu_writes_the_bytes_of_the_cpu(on_gpu, types, layout):
    for heads, head in itertools.product((1, 3), (32, 64, 120 if layout != "vllm" else 256)):
        given = tensors(types, layout, heads, head)
        want = right(given, layout=layout, k_scale=0.3, v_scale=3.0)
        there = {name: x.cuda() for name, x in given.items()}
        flashcli.write_kv(**there, layout=layout, k_scale=0.3, v_scale=torch.tensor(3.0, device="cuda"))
        check(there, want)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_vllms_operators_write_and_read_a_cache_on_a_gpu(on_gpu, kv_cache_dtype):
    kind = torch.float16 if kv_cache_dtype == "auto" else torch.uint8
    torch.manual_seed(0)
    key, value = torch.randn(2, 40, HEADS, D).half()
    chunk = 16 // kind.itemsize
    caches = torch.zeros(5, HEADS, D // chunk, PAGE, chunk, dtype=kind), torch.zeros(5, HEADS, D, PAGE, dtype=kind)
    query, tables = torch.randn(2, 3 * HEADS, D).half(), torch.tensor([[4, 0, 2], [1, 3, -1]]).int()
    slots = (tables[:, :, None] * PAGE + torch.arange(PAGE)).flatten()[:40].long()
    lengths, slopes = torch.tensor([21, 16]).int(), torch.rand(3 * HEADS)
    found = {}
    for device in ("cpu", "cuda"):
        there = [x.to(device, copy=True) for x in (key, value, *caches)]
        scales = [x.to(device) for x in (torch.tensor(0.5), torch.tensor(0.25))]
        flashcli.torch.reshape_and_cache(*there, slots.to(device), kv_cache_dtype, *scales)
        rest = [*(x.to(device) for x in (tables, lengths)), PAGE, 24, slopes.to(device), kv_cache_dtype, *scales]
        out = torch.full((2, 3 * HEADS, D), torch.nan, dtype=torch.float16, device=device)
        q = query.to(device)
        flashcli.torch.paged_attention_v1(out, q, *there[2:], HEADS, 0.3, *rest)
        again = torch.empty_like(out)
        flashcli.torch.paged_attention_v2(again, None, None, None, q, *there[2:], HEADS, 0.3, *rest)
        assert torch.equal(out, again)
        found[device] = out.cpu(), *(x.cpu() for x in there[2:])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found["cpu"][1:], found["cuda"][1:], strict=True))
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=0, atol=4e-3)


@pytest.mark.gpu
def test_a_compiled_function_has_a_break_at_it(on_gpu):
    given = {name: x.cuda() for name, x in tensors(TYPES[1], "nhd").items()}
    want = {name: x.clone() for name, x in given.items()}
    flashcli.write_kv(**want | {"key": want["key"] * 2}, layout="nhd")
    others = {name: x for name, x in given.items() if name != "key"}
    torch.compile(lambda key: flashcli.write_kv(key * 2, **others, layout="nhd"), backend="aot_eager")(given["key"])
    assert torch.equal(bits(given["key_cache"]), bits(want["key_cache"])) and given["key_cache"].any()


@pytest.mark.gpu
@pytest.mark.parametrize("query_type", ["float16", "float32"])
def test_a_graph_writes_a_token_and_reads_all_of_them(on_gpu, query_type):
    kind = getattr(torch, query_type)
    torch.manual_seed(0)
    rows, query = torch.randn(2, 20, 1, HEADS, D).to(kind).cuda(), torch.randn(1, 2 * HEADS, D).to(kind).cuda()
    caches = torch.zeros(2, PAGES, PAGE, HEADS, D, dtype=kind, device="cuda")
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32, device="cuda")
    length = torch.zeros(1, dtype=torch.int32, device="cuda")
    slot, new = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros_like(rows[:, 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashcli.write_kv(*new, *caches, slot, layout="nhd")
        out = flashcli.decode(query, *caches, table, length, layout="nhd")
    for n in range(20):
        new.copy_(rows[:, n])
        slot.fill_(int(table[0, n // PAGE]) * PAGE + n % PAGE)
        length.fill_(n + 1)
        graph.replay()
        q, k, v = (x.float().cpu().transpose(0, 1) for x in (query, *rows[:, : n + 1, 0]))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        want = torch.softmax(q @ k.mT * D**-0.5, -1) @ v
        torch.testing.assert_close(out.float().cpu(), want.transpose(0, 1), rtol=2e-3, atol=2e-3)


# What an import takes

IMPORT = "import sys, torch; had = 'torch._dynamo' in sys.modules; import flashcli.torch; "


def test_an_import_does_not_take_pytorchs_compiler_with_it():
    done = python("-c", IMPORT + "print(had, 'torch._dynamo' in sys.modules)")
    had, has = done.out.split()
    assert had == has, done.err


def test_where_pytorch_has_no_private_decorator_its_public_one_serves(monkeypatch):
    import torch._dynamo  # which has uses of its own for it

    with monkeypatch.context() as without:
        without.setattr(private, "disable_dynamo", None)
        broken = paged_tensors.uncompiled(lambda x: x + 1)
    assert torch.compile(lambda x: broken(x) * 2, backend="eager")(torch.ones(2)).tolist() == [4, 4]
