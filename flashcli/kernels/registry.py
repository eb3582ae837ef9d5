"""The operations by name, each with its kernels, to be compiled, listed and checked."""

from __future__ import annotations

from flashcli.kernels.backward import BACKWARD
from flashcli.kernels.decode import DECODE
from flashcli.kernels.merge import MERGE
from flashcli.kernels.plan import ATTENTION
from flashcli.kernels.tangents import TANGENTS
from flashcli.kernels.write_kv import WRITE_KV

OPERATIONS = {operation.name: operation for operation in (ATTENTION, BACKWARD, TANGENTS, DECODE, WRITE_KV, MERGE)}
