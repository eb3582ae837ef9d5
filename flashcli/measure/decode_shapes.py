"""The shapes at which paged decode is timed, by the names of rows."""

from __future__ import annotations

from flashcli.files.decode.cases import Case

MOST_SHORT = "1,6,22,54,103,170,255,361,487,634,804,996,1211,1450,1713,2000"  # 1 + 1999 (i/15)^2.25
SHAPES = {
    "8x4096 64/8": Case(8, 64, 8, 128, "4096"),
    "1x4096 32/8": Case(1, 32, 8, 128, "4096"),
    "1x32768 32/8": Case(1, 32, 8, 128, "32768"),
    "32x4096 32/8": Case(32, 32, 8, 128, "4096"),
    "64x1024 32/32": Case(64, 32, 32, 128, "1024"),
    "128x2048 32/4": Case(128, 32, 4, 128, "2048"),
    "256x512 32/8": Case(256, 32, 8, 128, "512"),
    "16x8192 32/8 D=64": Case(16, 32, 8, 64, "8192"),
    "131072 + 255x64": Case(256, 32, 8, 128, "131072,64x255"),
    "fp8 8x4096 64/8": Case(8, 64, 8, 128, "4096", cache_type="float8_e4m3fn"),
    "fp8 32x4096 32/8": Case(32, 32, 8, 128, "4096", cache_type="float8_e4m3fn"),
    "int8 8x4096 64/8": Case(8, 64, 8, 128, "4096", cache_type="int8"),
    "int8 32x4096 32/8": Case(32, 32, 8, 128, "4096", cache_type="int8"),
    "16x(1..2000) 32/8": Case(16, 32, 8, 128, "uniform:2000"),
    "16x(1..2000), most short": Case(16, 32, 8, 128, MOST_SHORT),
    "64x(1..4096) 32/8": Case(64, 32, 8, 128, "uniform:4096"),
    "fp8 64x(1..4096) 32/8": Case(64, 32, 8, 128, "uniform:4096", cache_type="float8_e4m3fn"),
    "fp32 8x4096 64/8": Case(8, 64, 8, 128, "4096", query_type="float32"),
    "fp32 1x32768 32/8": Case(1, 32, 8, 128, "32768", query_type="float32"),
}

# Batches on both sides of vLLM's rule for V1 or V2: 512 blocks, 8192 tokens, a partition.
OF_THE_RULE = {
    f"{S}x{tokens} 32/8": Case(S, 32, 8, 128, str(tokens))
    for S in (1, 8, 16, 32, 128)
    for tokens in (512, 1024, 4096, 8192, 16384)
}
