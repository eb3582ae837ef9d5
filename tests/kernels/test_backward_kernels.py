"""The registry of backward kernels: what every entry must keep to, and what the compiler says of it."""

from __future__ import annotations

import itertools
import re

import pytest
from emulator import claims
from support import sampled

from flashcli.asked.attention import Operand, backward, contiguous
from flashcli.asked.how import How
from flashcli.asked.shape import MAX_D
from flashcli.compiler import compiler
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.kernels.arguments import Strides
from flashcli.kernels.attention import KERNELS as FORWARD
from flashcli.kernels.backward import KERNELS, POINTERS, Argument, argument, choose, of_sizes, plan, problem_of
from flashcli.kernels.operation import Build, Gpu, Plan

HEADER = compiler.SOURCES / "backward" / "arguments.h"
SIZES = {"B": 2, "H": 4, "Hkv": 2, "M": 150, "N": 201}
HOPPER = Gpu((9, 0), 132)
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


@every_kernel
def test_the_source_is_there_and_says_what_it_is(kernel):
    source = (compiler.SOURCES / kernel.file).read_text()
    assert source.startswith("// ") and "// What it costs" in source


def test_every_source_is_registered():
    sources = sorted(str(path.relative_to(compiler.SOURCES)) for path in compiler.SOURCES.glob("backward/0*.cu"))
    assert sources == [kernel.file for kernel in KERNELS.values()]


def test_the_header_has_the_fields_that_python_has():
    text = re.sub(r"//.*", "", HEADER.read_text()).replace("} Strides;", "").replace("} Backward;", "")
    names = [name for struct in (Strides, Argument) for name, _ in struct._fields_]
    assert re.findall(r"(\w+)\s*[,;]", text) == names


def test_every_field_is_where_python_puts_it(emulated, tmp_path):
    claims.check(tmp_path, "backward/arguments.h", claims.of_fields(Argument, "Backward"))


@pytest.mark.parametrize(
    ("kernel", "problem"),
    sampled([
        ("mma", of_sizes(64, True, "float32")), ("mma", of_sizes(128)), ("mma", of_sizes(64, bias="bool")),
        ("wgmma", of_sizes(64, aligned=False)), ("wgmma", of_sizes(64, bias="float32")),
        ("wgmma", of_sizes(80, True, "float32")), ("wgmma", of_sizes(128, True)), ("wgmma", of_sizes(112, bias="bool")),
        ("wgmma_short", of_sizes(32, bias="float32", M=128, N=128)), ("wgmma_short", of_sizes(64, True, M=192, N=128)),
        ("mma_short", of_sizes(32, True, M=96, N=96)), ("mma_short", of_sizes(64, bias="float32", M=128, N=128)),
        ("mma_short", of_sizes(64, M=64, N=64)), ("mma_short", of_sizes(64, True, "float32", M=48, N=48)),
        ("wgmma_whole", of_sizes(64, bias="float32", M=128, N=128)), ("wgmma_whole", of_sizes(32, True, M=96, N=96)),
        ("wgmma_whole", of_sizes(64, M=64, N=64)),
    ], 9),
)  # fmt: skip
def test_hardly_a_register_is_spilled(resources, kernel, problem):
    """Forms that have hardly a register left; only mma with a bias of floats, or heads of 128, may spill two."""
    for function, found in resources(Build(KERNELS[kernel], problem), "sm_90a").items():
        assert found.spilled <= 8 * (kernel == "mma" and problem.bias != "bool") and not found.warnings, function


@every_kernel
def test_every_head_size_has_tiles_that_fit(kernel):
    for d in range(1, MAX_D + 1):
        if not kernel.refuses(of_sizes(d)):
            tiling = kernel.tiling(of_sizes(d))
            assert tiling.threads in range(32, 1025, 32)
            most = 48 if kernel.name == "plain" else 226 if kernel.arch_only else 99  # of any GPU; of Hopper; of sm_86
            assert tiling.shared <= most * 1024


def planned(name: str, B: int, H: int, Hkv: int, M: int, N: int, dbias: bool = False) -> Plan:
    """Gradients of heads of 64 numbers, with those of a bias of each head and key if that is wanted."""
    q, k = contiguous((B, H, M, 64), "float32"), contiguous((B, Hkv, N, 64), "float32")
    bias = contiguous((H, 1, N), "float32") if dbias else None
    return plan(backward(q, q, k, k, bias=bias, return_dbias=dbias).at(0), HOPPER, How(name))


@every_kernel
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (14000, 2, 1, 128, 3, True)])
def test_every_launch_has_blocks_and_a_function(kernel, sizes):
    if kernel.name.endswith(("_short", "_whole")):  # each head of Q has its own of K
        sizes = (*sizes[:2], sizes[1], *sizes[3:])
    last = "dk_dv" if len(sizes) <= 5 else "dbias_again" if kernel.name.startswith("wgmma") else "dbias"
    if kernel.name in ("mma_short", "wgmma_whole"):  # which have no gradient of a bias
        sizes = sizes[:5]
    if kernel.name.endswith(("_short", "_whole")) and len(sizes) <= 5:
        last = "gradients"
    steps = planned(kernel.name, *sizes).steps
    assert [step.launch.function for step in steps][-1] == last
    for step in steps:
        assert step.launch.function in {launch.function for launch in step.build.functions()}
        assert 1 <= step.launch.grid < 2**31 and step.launch.threads % 32 == 0


@pytest.mark.parametrize("name", ["mma", "wgmma"])
def test_a_kernel_that_splits_is_followed_by_one_that_does_not(name):
    found = planned(name, **SIZES)
    [(notes, word, count)], [(place, inside)] = found.clear, found.inside
    assert found.kernel == name and word == 0 and count >= 1 + 4 and POINTERS[place] == "notes"
    assert found.workspace >= notes + 4 * count and notes == inside and notes % 16 == 0
    assert [(s.build.kernel.name, s.launch.function) for s in found.steps][-2:] == [
        ("register_tiled", "dq"), ("register_tiled", "dk_dv")
    ]  # fmt: skip
    exact = planned("register_tiled", **SIZES)
    assert not exact.clear and len({step.build.kernel.name for step in exact.steps}) == 1


@pytest.mark.parametrize("name", ["mma_short", "wgmma_whole", "wgmma_short"])
def test_blocks_of_whole_heads_leave_nothing_to_another_launch(name):
    found = planned(name, B=2, H=2, Hkv=2, M=100, N=101)
    assert [step.launch.function for step in found.steps] == ["gradients"] and not found.clear
    assert not found.workspace


def test_rows_are_kept_where_another_kernel_follows():
    sizes = {"B": 2, "H": 2, "Hkv": 2, "M": 100, "N": 101}
    problem = of_sizes(64, bias="alibi and both", dbias=(1, 2, 100, 101), **sizes)
    assert Build(KERNELS["wgmma_short"], problem).workspace() == 16 * 2 * 2 * 100


@pytest.mark.parametrize("name", ["plain", "mma"])
def test_with_one_key_v_and_o_are_a_row_of_zeros(name):
    """Softmax over one key has no gradient: what is rounded of dP and of D would be all that dK is made of."""
    found = planned(name, B=2, H=2, Hkv=1, M=100, N=1)
    places = dict(found.inside)
    for which, strides in (("V", found.argument.v), ("O", found.argument.o)):
        index = POINTERS.index(which)
        assert index in found.unread and (places[index], 0, 64) == found.clear[-1] and places[index] % 16 == 0
        assert (strides.batch, strides.head, strides.row) == (0, 0, 0)
    assert found.workspace == found.clear[-1][0] + 4 * 64
    assert not planned(name, B=2, H=2, Hkv=1, M=100, N=2).unread


@pytest.mark.parametrize(
    ("capability", "d", "chosen"),
    [
        ((6, 1), 64, "plain"), ((8, 0), 64, "mma"), ((9, 0), 64, "wgmma"), ((10, 0), 64, "mma"),
        ((9, 0), 8, "register_tiled"), ((9, 0), 200, "register_tiled"),
    ],
)  # fmt: skip
def test_the_fastest_kernel_that_runs_is_chosen(capability, d, chosen):
    assert choose(capability, of_sizes(d, **SIZES)).name == chosen


def problem(d: int, sizes: tuple[int, ...]):
    """Heads of ``d`` numbers, and B, H, Hkv, M and N."""
    return of_sizes(d, **dict(zip(SIZES, sizes, strict=True)))


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ((200, 1, 1, 150, 128), "wgmma_short"), ((1, 2, 2, 40, 32), "mma_short"), ((200, 1, 1, 80, 64), "wgmma_whole"),
        ((20, 1, 1, 150, 128), "wgmma"), ((200, 2, 1, 128, 128), "wgmma"), ((9, 2, 1, 64, 64), "wgmma"),
        ((200, 1, 1, 128, 1000), "wgmma"), ((1, 1, 1, 60, 64), "wgmma_whole"), ((1, 1, 1, 128, 128), "wgmma_whole"),
    ],
)  # fmt: skip
def test_whole_heads_where_they_are_short_and_many(sizes, chosen):
    assert choose((9, 0), problem(64, sizes)).name == chosen


@pytest.mark.parametrize("B", [1, 1000])
def test_one_pass_by_wgmma_where_64_rows_are_nearly_full_or_mma_has_room_for_one_head(B):
    by_mma = {d: [choose((9, 0), problem(d, (B, 1, 1, N, N))).name == "mma_short" for N in (40, 48, 64, 96, 97, 128)]
              for d in (16, 24, 64)}  # fmt: skip
    assert by_mma == {16: [1, 1, 1, 1, 0, 0], 24: [1, 1, 0, 1, 0, 0], 64: [1, 0, 0, 0, 0, 0]}


@pytest.mark.parametrize("name", ["mma_short", "wgmma_whole"])
def test_three_heads_of_64_rows_share_a_multiprocessor_but_for_a_mask_that_takes_registers(name):
    tilings = [KERNELS[name].tiling(of_sizes(64, bias=bias, M=64, N=64)) for bias in ("", "float32", "bool", "both")]
    assert [dict(tiling.macros)["BLOCKS"] for tiling in tilings] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("d", "sizes", "why"),
    [
        (64, (1, 2, 1, 64, 64), "each head of Q must have its own of K"),
        (64, (1, 2, 2, 300, 200), "its heads are too long"),
        (80, (1, 1, 1, 5, 5), "heads of up to"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["wgmma_short", "mma_short", "wgmma_whole"])
def test_a_head_that_does_not_fit_a_block_is_refused(d, sizes, why, name):
    with pytest.raises(
        BackendUnavailable, match=why if name == "wgmma_short" or "long" not in why else "up to 128 rows"
    ):
        choose((9, 0), problem(d, sizes), name)


def test_a_kernel_that_cannot_be_says_why():
    with pytest.raises(UsageError, match="there is no kernel 'foo' for gradients"):
        choose((9, 0), of_sizes(64, **SIZES), "foo")
    with pytest.raises(BackendUnavailable, match="kernel mma needs sm_80, this GPU is sm_75"):
        choose((7, 5), of_sizes(64, **SIZES), "mma")
    with pytest.raises(BackendUnavailable, match="kernel mma cannot compute d = 129: it takes heads of up to 128"):
        choose((9, 0), of_sizes(129, **SIZES), "mma")


def test_arguments_are_where_their_names_say():
    q, k = Operand((2, 4, 5, 8), (320, 8, 32, 1), "float32"), contiguous((2, 2, 7, 8), "float32")
    bias = contiguous((4, 1, 7), "float32")
    asked = backward(q, q, k, k, bias=bias, causal=True, q_start=2, return_dbias=True)
    given = argument(asked)

    def strides(name: str) -> list[int]:
        return [getattr(getattr(given, name), axis) for axis in ("batch", "head", "row")]

    assert strides("d_o") == strides("q") == [320, 8, 32] and strides("dq") == [160, 40, 8]
    assert strides("k") == strides("dv") == [112, 56, 8] and strides("lse_at") == [20, 5, 1]
    assert strides("bias_strides") == strides("dbias_at") == [0, 7, 0] and given.bias_column == given.dbias_column == 1
    assert (given.B, given.H, given.Hkv, given.M, given.N, given.q_start) == (2, 4, 2, 5, 7, 2)
    found = problem_of(asked, HOPPER)
    assert (found.B, found.heads, found.group, found.M, found.N, found.dbias) == (8, 4, 2, 5, 7, (1, 4, 1, 7))


def test_operations_do_not_share_names_by_chance():
    both = set(KERNELS) & set(FORWARD)
    # One idea, of one name; their code is cached under a hash of it.
    assert both == {"register_tiled", "mma", "wgmma", "wgmma_short", "mma_short"}


def test_a_longer_input_never_needs_less_workspace():
    sizes = {"B": 2 * 4, "group": 2, "M": 150, "N": 201}
    for kernel, d in itertools.product(KERNELS.values(), (16, 64, 100)):
        if kernel.refuses(of_sizes(d)):
            continue
        build = Build(kernel, of_sizes(d))
        scratch = kernel.name not in ("mma_short", "wgmma_whole", "wgmma_short")
        assert build.workspace(**sizes) >= scratch * 16 * 2 * 4 * 150
        assert build.workspace(**sizes | {"N": 2000}) >= build.workspace(**sizes)
