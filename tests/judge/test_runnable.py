"""Programs that are scripts or sources: either they run, or a sentence says how they will."""

from __future__ import annotations

import pytest
from support import flashcli, script

from flashcli.judge.submissions import Submission


@pytest.fixture
def place(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.mark.parametrize(
    ("name", "text", "mode", "said", "hint"),
    [
        ("solve.py", "print(1)\n", 0o755, "what interprets it", "write #!/usr/bin/env python3 as its first line."),
        ("solve.py", "print(1)\n", 0o644, "permission denied", "#!/usr/bin/env python3 as its first line and chmod +x"),
        ("solve.py", "#!/usr/bin/env python3\n", 0o644, "permission denied", "Hint: chmod +x it."),
        (
            "attn.c",
            "int main(void) {}\n",
            0o644,
            "it is source, to be compiled",
            "--build 'cc -O2 -o attn attn.c -lm'.",
        ),
        ("attn.c", "int main(void) {}\n", 0o755, "it is source, to be compiled", "built by --exe attn --build"),
    ],
)
def test_what_cannot_be_run_is_told_how_it_can_be(cases, place, name, text, mode, said, hint):
    (place / name).write_text(text)
    (place / name).chmod(mode)
    done = flashcli("judge", cases, "--exe", name, cwd=place)
    done.assert_error(2, f"{name!r} cannot be run", said)
    assert hint in done.err


@pytest.mark.parametrize(("nvcc", "command"), [("/bin/sh", "nvcc -O2"), ("", "flashcli emulate")])
def test_cuda_is_compiled_for_the_cpu_where_there_is_no_nvcc(cases, place, nvcc, command):
    (place / "attn.cu").write_text("int main(void) {}\n")
    done = flashcli("judge", cases, "--exe", "attn.cu", cwd=place, env={"NVCC": nvcc})
    done.assert_error(2, "it is source, to be compiled")
    assert f"--build '{command} -o attn attn.cu'." in done.err


def test_a_command_of_several_words_is_told_to_name_one_file(cases, place):
    done = flashcli("judge", cases, "--exe", "python3 solve.py", cwd=place)
    done.assert_error(2, "'python3 solve.py' cannot be run: no such file")
    assert "name one file: solve.py with #!/usr/bin/env python3 as its first line" in done.err


def test_the_hint_for_a_source_works(cases, compiled, place):
    compiled("right")  # or skip
    (place / "attn.c").write_text('#include <stdio.h>\nint main(void) { puts("built"); return 4; }\n')
    build = "cc -O2 -o attn attn.c -lm"
    done = flashcli("judge", cases, "--exe", "attn", "--build", build, "--case", "c1", cwd=place)
    assert "exit code 4: built" in done.out


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("print(1)\n", "it cannot be run: it is neither a program for this machine nor a script that begins with #!"),
        (
            "#!/no/such/interpreter -x\n",
            "it cannot be run: there is no '/no/such/interpreter', which its line #! names",
        ),
        ("#!/bin/sh\r\n", r"it cannot be run: there is no '/bin/sh\r', which its line #! names"),
    ],
)
def test_a_submission_that_does_not_start_says_why(case, judging, tmp_path, text, detail):
    program = script(tmp_path / "hw4", text)
    [found] = judging().results([case], [Submission("odd", (str(program),))])
    assert found.verdict == "runtime error" and found.detail.startswith(detail)
