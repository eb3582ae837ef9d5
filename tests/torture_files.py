"""Files of paged decode that are damaged at random. `make torture` prints a summary.

A damaged file is refused in one sentence, and nothing is left; or what can be read of it is decoded rightly.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torturing
from paged_oracle import oracle
from torture_arrays import decode_case
from torturing import Choose, demand, near

from flashcli.cpu.decode import DecodeCpu
from flashcli.errors import FlashError
from flashcli.files.decode.cases import generate
from flashcli.files.decode.tensors import Tensors, read_decode
from flashcli.run.decode import run

ODD_NUMBERS = (-1, 0, 1, 7, 2**31, 2**32 + 8, 2**63, 2**64, 10**30, 1.0, 1e300, True, None, "8", [], {})


def damaged(choose: Choose, entries: list[tuple[str, Any]]) -> None:
    """Damage one entry of a header, which may have names twice."""
    index = choose.randrange(len(entries))
    name, entry = entries[index]
    way = choose.choice(["twice", "offsets", "offset", "dtype", "shape", "axis", "metadata", "field", "name", "gone"])
    if way == "twice":
        entries.insert(choose.randrange(len(entries)), (name, choose.choice(entries)[1]))
    elif way == "gone":
        del entries[index]
    elif way == "name":
        entries[index] = choose.choice(["", "query", "\0", "k" * 10**5, "\ud800", "__metadata__"]), entry
    elif way == "metadata":
        odd = choose.choice([
            None, 3, [], {}, {"layout": 1}, {"layout": {}}, {"scale": "1e400"}, {"layout": "x" * 10**5},
            {"scale": "-inf"}, {"sliding_window": "9" * 4000}, {"vert_stride": "3"}, {"scale": "1_0"},
        ])  # fmt: skip
        entries.insert(choose.choice([0, len(entries)]), ("__metadata__", odd))
    elif not isinstance(entry, dict) or "dtype" not in entry or not isinstance(entry.get("shape"), list):
        entries[index] = name, choose.choice(ODD_NUMBERS)
    else:
        entry = entries[index][1].copy()
        if way == "offsets":
            entry["data_offsets"] = choose.choice([e.get("data_offsets") for _, e in entries if isinstance(e, dict)])
        elif way == "offset":
            entry["data_offsets"] = [choose.choice([x, x + 1, choose.choice(ODD_NUMBERS)]) for x in [0, 64]]
        elif way == "dtype":
            entry["dtype"] = choose.choice(["F64", "I64", "U8", "BOOL", "F4", "BF16", "F32", "F8_E5M2", "f32", 7, None])
        elif way == "shape":
            entry["shape"] = choose.choice([[], [0], [2**32, 2**32], [1] * 70, entry["shape"][::-1], None, "3", [[1]]])
        elif way == "axis" and entry["shape"]:
            entry["shape"] = [*entry["shape"][1:], choose.choice(ODD_NUMBERS)]
        else:
            entry[choose.choice(["dtype", "shape", "data_offsets", "more"])] = choose.choice(ODD_NUMBERS)
        entries[index] = name, entry


def tensor_file(choose: Choose, rng: np.random.Generator) -> str:
    """A damaged file is refused, and nothing is left; or what is read from it is decoded rightly."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "x.safetensors"), Path(folder, "out")
        generate(path, decode_case(choose))
        code = path.read_bytes()
        end = 8 + struct.unpack_from("<Q", code)[0]
        entries, data = list(json.loads(code[8:end]).items()), bytearray(code[end:])
        way = choose.choice(["header", "header", "header", "text", "data", "length"])
        for _ in range(choose.choice([1, 1, 2]) if way == "header" else 0):
            damaged(choose, entries)
        text = b"{" + b",".join(f"{json.dumps(name)}:{json.dumps(x)}".encode() for name, x in entries) + b"}"
        if way == "text":
            at, deep = choose.randrange(len(text)), 10 ** choose.randint(2, 6)
            odd = [b"\xff", b"\0", b"[" * deep, b'{"a":' * deep, b" " * deep, b"NaN", b"\xef\xbb\xbf", b'"', b"-0", b""]
            text = text[:at] + choose.choice(odd) + text[at + choose.choice([0, 1]) :]
        if way == "data" and data:
            for at in rng.integers(0, len(data), choose.choice([1, 10, 100])):
                data[at] = choose.randrange(256)
            del data[choose.choice([len(data), len(data) - 1, 0]) :]
            data += choose.choice([b"", b"x"])
        size = len(text) if way != "length" else choose.choice([0, 1, 2**31, 2**63, 2**64 - 1, len(text) - 1, 10**8])
        path.write_bytes(struct.pack("<Q", size) + text + data)
        try:
            with np.errstate(all="ignore"):
                run(path, out, DecodeCpu)
        except FlashError as error:
            demand(len(str(error)) < 600, f"a sentence of {len(str(error))} characters: {str(error)[:300]}")
            demand(os.listdir(folder) == [path.name], f"left {os.listdir(folder)}")
            return f"refused, {way}"
        asked, _ = read_decode(path)
        got = Tensors(out)["out"].astype(np.float64).reshape(asked.query.shape)
        with np.errstate(all="ignore"):
            want = oracle(asked)[0].reshape(got.shape) if way != "data" else got  # damaged numbers may be of any size
        near(got, want, 0.05 * max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0))), "out of a file")
        return f"taken, {way}"


def main(trials: int, seconds: int, seed: int) -> torturing.Tally:
    print(f"{trials} damaged files:", flush=True)
    return torturing.tried({"files": tensor_file}, trials, seconds, seed)


if __name__ == "__main__":
    torturing.end(main, __doc__, trials=600, seconds=3600)
