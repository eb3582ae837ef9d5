"""The course report's ladder, as it was measured on a GTX 1080: what ours is shown beside."""

from __future__ import annotations

# Seconds of what the report calls Computing: memory on the GPU, copies to and fro, and the kernel.
COMPUTING: dict[str, dict[str, float]] = {
    "t10": {"sequential": 21.61, "baseline": 4.305, "fused": 0.984, "max_shared": 0.434, "split_q": 0.247},
    **{
        case: dict(zip(
            ("split_q", "float4", "restructured", "coalesced", "ml_in_registers", "no_bank_conflicts",
             "q_in_registers"), seconds, strict=True,
        ))
        for case, seconds in {
            "t11": (0.832, 0.768, 0.74, 0.739, 0.741, 0.695, 0.658),
            "t22": (6.552, 2.516, 2.348, 2.335, 2.373, 1.598, 1.435),
            "t29": (8.055, 2.526, 2.432, 2.412, 2.441, 0.737, 0.668),
            "t30": (6.271, 2.124, 1.846, 1.812, 1.806, 1.043, 0.878),
        }.items()
    },
}  # fmt: skip


def gain(case: str, slower: str, faster: str) -> float | None:
    """How many times faster the report has one rung than another on a case; None where it does not say."""
    seconds = COMPUTING.get(case, {})
    return seconds[slower] / seconds[faster] if slower in seconds and faster in seconds else None
