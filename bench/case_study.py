"""Steps of a case study on GPT-2's attention: what each changes, and which rungs of our ladder have that.

Source: Gordon Gustafson, "llm-inference", of whose twelve versions only the descriptions were read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GLOBAL, SHARED, REGISTERS = range(3)  # where O is
HEAD = 64
BEGINNING = {
    "PAD": 0, "FAST_EXP": 0, "SHUFFLE": 0, "DIVIDE_LATE": 0, "READ_ONLY": 0, "FLOAT4": 0, "O_PLACE": GLOBAL, "TILED": 0,
    "SWIZZLE": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A change, the rungs of our ladder that have it, and what differs from the step before in macros and threads.

    A block has ``across`` x ``down`` threads on Br x Bc scores; 0 is as before.
    """

    name: str
    change: str
    rungs: str
    macros: dict[str, int] = field(default_factory=dict)
    across: int = 0
    down: int = 0
    Br: int = 0
    Bc: int = 0


STEPS = (
    Step("v1", "one kernel; O, m and l in global memory", "`fused`", BEGINNING, 32, 16, 64, 64),
    Step("v2", "rows of K padded by 4 bytes", "`no_bank_conflicts`, by other layouts", {"PAD": 1}),
    Step("v3", "32 x 32 threads on tiles of 32 x 32", "none", {}, 32, 32, 32, 32),
    Step("v4", "an approximate exponential", "`restructured`", {"FAST_EXP": 1}),
    Step("v5", "m and l by warp shuffles, in registers", "`ml_in_registers`, without shuffles", {"SHUFFLE": 1}),
    Step("v6, division", "division out of the loop over keys", "all", {"DIVIDE_LATE": 1}),
    Step("v6, restrict", "loads as `__restrict__` allows them", "none", {"READ_ONLY": 1}),
    Step("v7", "four numbers to a load", "`float4`", {"FLOAT4": 1}),
    Step("v8", "O in shared memory", "none", {"O_PLACE": SHARED}),
    Step("v9", "a register tile of 2 x 1", "none", {"TILED": 1}, 16, 32),
    Step("v10", "a register tile of 2 x 2", "none", {}, 16, 32, 64, 32),
    Step(
        "v12", "a register tile of 4 x 4; O in registers, a swizzle for the padding",
        "`o_in_registers`; `register_tiled`, with 8 x 8",
        {"O_PLACE": REGISTERS, "SWIZZLE": 1, "PAD": 0}, 16, 16, 64, 64,
    ),
)  # fmt: skip
